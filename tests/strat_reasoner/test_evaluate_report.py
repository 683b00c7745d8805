"""Intervals, ratings, reports and the commands `evaluate` and `play`, with real players and a real Ray worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from common.config import ConfigError
from strat_reasoner.cli import app
from strat_reasoner.evaluate import (
    EstimatedTable,
    estimate_table,
    exploitability,
    exploitability_interval,
    value_against,
    value_interval,
)
from strat_reasoner.evaluate_intervals import Interval, paired_difference
from strat_reasoner.evaluate_matches import play_long, play_matches
from strat_reasoner.evaluate_rating import Tournament, bradley_terry, tournament
from strat_reasoner.evaluate_report import evaluate_player
from strat_reasoner.games import Decision, Game, Move, Player, get_game
from strat_reasoner.opponents import PolicyTable, RandomPlayer, TablePlayer, equilibrium, mix, uniform_table
from strat_reasoner.opponents_named import make_player
from strat_reasoner.opponents_search import FirstLegalPlayer, MctsPlayer, PerfectPlayer
from strat_reasoner.transcripts import sample_games

KUHN, BOARD = get_game("kuhn"), get_game("tic-tac-toe")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Solve into a folder of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def no_models(path: Path, game: Game) -> Player:
    raise AssertionError(f"{path} should not be loaded")


def drawn(table: PolicyTable, samples: int, rng: np.random.Generator) -> EstimatedTable:
    """Zeros and ones, as from drawn moves."""
    return EstimatedTable({k: np.eye(len(row))[rng.choice(len(row), samples, p=row)] for k, row in table.items()})


def test_intervals_hold_the_exact_value_as_often_as_they_say() -> None:
    """95 % intervals hold it 87 of 100 times or fewer with probability 0.001; experiments/ has the full study."""
    solved = equilibrium(KUHN)
    policy = mix(solved, uniform_table(KUHN), 0.5)
    value, exploited = value_against(KUHN, policy, solved, 1), exploitability(KUHN, policy)
    held = np.zeros(2)
    for repeat in range(100):
        rng = np.random.default_rng((3, repeat))
        table = drawn(policy, 100, rng)
        for i, (interval, exact) in enumerate(
            [
                (value_interval(KUHN, table, solved, 1, rng), value),
                (exploitability_interval(KUHN, table, rng), exploited),
            ]
        ):
            held[i] += interval.low <= exact <= interval.high
    assert (held > 87).all()


def test_the_table_estimate_scatters_at_least_three_times_less_than_play_with_as_many_answers() -> None:
    solved = equilibrium(KUHN)
    policy = mix(solved, uniform_table(KUHN), 0.5)
    played, exact = [], []
    for repeat in range(40):
        match = play_matches(KUHN, TablePlayer(policy, "p"), TablePlayer(solved, "e"), 0, 120, seed=repeat)
        played.append(match.returns.mean())
        table = drawn(policy, 120 // 6, np.random.default_rng(repeat)).table()  # six information states of the seat
        exact.append(value_against(KUHN, table, solved, 0))
    assert np.std(played) > 3 * np.std(exact)


def test_paired_games_tell_a_small_difference_from_none() -> None:
    rng = np.random.default_rng(0)
    luck = rng.normal(size=400)
    first, second = luck + 0.05 * rng.normal(size=400) + 0.1, luck
    assert paired_difference(first, second, rng).low > 0
    assert paired_difference(first, first, rng) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="as many on both sides, not 400 and 399"):
        paired_difference(first, second[1:], rng)


def test_the_normalised_score_is_0_at_the_worst_and_100_at_the_best_response() -> None:
    score = Interval(0.5, -1.0, 1.0).scaled(-1.0, 2.0)
    assert (score.value, score.low, score.high) == pytest.approx((50.0, 0.0, 200 / 3))
    best = make_player("best-response:equilibrium", KUHN, no_models)
    report = evaluate_player(KUHN, best, make_player("equilibrium", KUHN, no_models), 20, 2, seed=0)
    for seat in report.seats:
        assert seat.value is not None
        assert seat.normalised_score.value == pytest.approx(100.0)


class _Sloppy:
    """Passes, but gives no legal move in a quarter of its answers, and breaks the format in half of those."""

    name = "sloppy"

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        kinds = rng.integers(8, size=len(decisions))
        bad = [Move(None, "<think> \x1b[2J", False), Move(None, "fold", True)]
        return [
            bad[k] if k < 2 else Move(seen.legal[0], seen.words[0]) for k, seen in zip(kinds, decisions, strict=True)
        ]


def test_bad_answers_are_counted_and_cost_what_they_cost_in_play() -> None:
    solved = TablePlayer(equilibrium(KUHN), "equilibrium")
    report = evaluate_player(KUHN, _Sloppy(), solved, 1500, 1500, seed=1)
    assert report.table_illegal_rate == pytest.approx(0.25, abs=0.02)
    for seat in report.seats:
        assert seat.malformed_rate.low < 0.125 < seat.malformed_rate.high
        assert seat.value is not None
        assert seat.mean_return.low - 0.03 < seat.value.value < seat.mean_return.high + 0.03
    assert report.exploitability is not None
    scaled = estimate_table(_Sloppy(), KUHN, 200, np.random.default_rng(0))
    assert exploitability(KUHN, scaled.table()) < report.exploitability.low


def test_bradley_terry_gives_the_odds_of_two_and_ranks_many() -> None:
    """Two players: the maximum likelihood is the odds themselves, 400 log10(3) apart for 3 : 1."""
    ratings = bradley_terry(np.array([[0.0, 75.0], [25.0, 0.0]]), prior=0.0)
    assert ratings[0] - ratings[1] == pytest.approx(400 * np.log10(3), abs=1e-6)
    assert ratings.sum() == pytest.approx(0, abs=1e-9)
    rng = np.random.default_rng(0)
    true = np.array([300.0, 0.0, -300.0])
    points = {
        (i, j): (rng.random(4000) < 1 / (1 + 10 ** ((true[j] - true[i]) / 400))).astype(float)
        for i, j in ((0, 1), (0, 2), (1, 2))
    }
    for interval, exact in zip(Tournament(("a", "b", "c"), points).ratings(rng, 100), true, strict=True):
        assert interval.low - 10 < exact < interval.high + 10
    assert np.isfinite(bradley_terry(np.array([[0.0, 10.0], [0.0, 0.0]]))).all()


def test_poker_is_rated_by_chips_not_by_games_won() -> None:
    players = [RandomPlayer(), TablePlayer(equilibrium(KUHN), "equilibrium")]
    random_play, solved = tournament(KUHN, players, 1500, seed=0).ratings(np.random.default_rng(0), 50)
    assert solved.value > random_play.value


def test_a_tournament_ranks_players_as_they_play() -> None:
    players = [RandomPlayer(), PerfectPlayer(BOARD), MctsPlayer(BOARD, 20, 1)]
    played = tournament(BOARD, players, 40, seed=0)
    ratings = played.ratings(np.random.default_rng(0), 50)
    assert ratings[1].value > ratings[2].value > ratings[0].value
    assert ratings[0].high < ratings[1].low
    with pytest.raises(ConfigError, match="zero-sum game of two"):
        tournament(get_game("mini-hanabi"), players, 2, seed=0)
    arguments = [
        "rate",
        "--game",
        "tic-tac-toe",
        "--player",
        "perfect",
        "--player",
        "random",
        "--games",
        "20",
        "--json",
    ]
    printed = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert printed["perfect"]["low"] > printed["random"]["high"]


@pytest.mark.cluster
def test_ray_workers_give_the_same_games() -> None:
    arguments = (BOARD, RandomPlayer(), MctsPlayer(BOARD, 10, 1), 0, 250, 9)
    finished: list[int] = []
    parallel = play_long(*arguments, workers=2, on_progress=finished.append)
    np.testing.assert_array_equal(play_long(*arguments).returns, parallel.returns)
    assert finished == [100, 100, 50]


@pytest.mark.parametrize(
    ("text", "game", "expected"),
    [
        ("randm", "kuhn", "did you mean 'random'"),
        ("mcts:", "tic-tac-toe", "like mcts:1000"),
        ("mcts:ten", "tic-tac-toe", "like mcts:1000"),
        ("mcts:5", "kuhn", "hidden information"),
        ("equilibrium", "connect-four", "connect-four is not"),
        ("best-response", "kuhn", "like best-response:random"),
        ("2*random,mcts:5", "kuhn", "should be WEIGHT\\*PLAYER"),
        ("0*random", "kuhn", "positive weight"),
        ("perfect", "leduc", "only tic-tac-toe"),
    ],
)
def test_players_that_cannot_be_are_refused_with_the_way_out(text: str, game: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_player(text, get_game(game), no_models)


def test_the_evaluate_command_prints_json_and_writes_transcripts(tmp_path: Path) -> None:
    file = tmp_path / "new" / "games.txt"
    arguments = ["evaluate", "--policy", "random", "--game", "kuhn", "--opponent", "equilibrium", "--games", "60"]
    arguments += ["--json", "--transcripts"]
    result = CliRunner().invoke(app, [*arguments, str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [seat["seat"] for seat in report["seats"]] == [0, 1]
    assert report["seats"][0]["value"]["value"] == pytest.approx(-1 / 6, abs=1e-3)
    assert report["exploitability"]["value"] == pytest.approx(0.4583, abs=1e-4)
    text = file.read_text()
    assert text.count("\ngame ") == 10
    assert "player 0 (random) sees: hold " in text
    again = CliRunner().invoke(app, [*arguments, str(file)])
    assert json.loads(again.stdout) == report


def test_transcripts_show_bad_answers_without_control_characters() -> None:
    text = sample_games(KUHN, _Sloppy(), FirstLegalPlayer(), seed=2, count=20).text()
    assert "plays: malformed answer" in text
    assert "plays: no legal move" in text
    assert "\x1b" not in text


def test_a_person_plays_to_the_end_after_a_typing_error(tmp_path: Path) -> None:
    file = tmp_path / "game.txt"
    arguments = ["play", "--opponent", "first-legal", "--game", "tic-tac-toe", "--seed", "0", "--transcript", str(file)]
    result = CliRunner().invoke(app, arguments, input="nine\n9\n6\n3\n")
    assert result.exit_code == 0, result.output
    assert "'nine' is no legal move" in result.output
    assert "your return is +1" in result.output
    assert "player 0 (you) sees: o o _ _ _ x _ _ x" in file.read_text()
    refused = CliRunner().invoke(app, ["play", "--opponent", "random", "--game", "kuhn", "--seat", "2"])
    assert isinstance(refused.exception, ConfigError)


def test_only_players_that_say_so_go_without_the_prompt() -> None:
    class Reader(FirstLegalPlayer):
        reads_prompt = True
        prompts: ClassVar[list[str]] = []

        def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
            self.prompts += [seen.prompt for seen in decisions]
            return super().act(decisions, states, rng)

    reading = play_matches(KUHN, Reader(), RandomPlayer(), 0, 20, seed=1)
    assert all("Your card: " in prompt for prompt in Reader.prompts)
    assert len(Reader.prompts) == reading.answers >= 20
    without = play_matches(KUHN, FirstLegalPlayer(), RandomPlayer(), 0, 20, seed=1)
    np.testing.assert_array_equal(reading.returns, without.returns)
