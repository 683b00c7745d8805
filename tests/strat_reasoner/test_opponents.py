"""Opponents against the values of OpenSpiel 2.0.2, and exact values against OpenSpiel's own algorithms."""

from __future__ import annotations

import numpy as np
import pyspiel
import pytest

from common.config import ConfigError
from strat_reasoner.evaluate import exploitability, score_range, value_against
from strat_reasoner.evaluate_matches import play_long, play_matches
from strat_reasoner.evaluate_tree import game_tree
from strat_reasoner.games import Player, decision, get_game, load
from strat_reasoner.opponents import PolicyTable, RandomPlayer, TablePlayer, decision_states, equilibrium, uniform_table
from strat_reasoner.opponents_search import FirstLegalPlayer, MctsPlayer, PerfectPlayer, Pool, best_response

KUHN, LEDUC, BOARD = get_game("kuhn"), get_game("leduc"), get_game("tic-tac-toe")


@pytest.fixture(scope="module")
def kuhn_solved(tmp_path_factory: pytest.TempPathFactory) -> PolicyTable:
    return equilibrium(KUHN, cache_dir=tmp_path_factory.mktemp("cache"))


def random_table(name: str, seed: int) -> PolicyTable:
    rng = np.random.default_rng(seed)
    return {infoset: rng.dirichlet(np.ones(len(row))) for infoset, row in uniform_table(get_game(name)).items()}


def agrees(returns: np.ndarray, published: float, games: int) -> None:
    """Both are means of samples: they differ by at most 3.5 standard errors of the difference."""
    error = returns.std() * np.sqrt(1 / len(returns) + 1 / games)
    assert abs(returns.mean() - published) < 3.5 * error + 0.005


def test_leduc_values_are_the_published_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    solved = equilibrium(LEDUC, 600, tmp_path_factory.mktemp("cache"))
    uniform = uniform_table(LEDUC)
    assert value_against(LEDUC, solved, solved, 0) == pytest.approx(-0.0856, abs=2e-4)
    assert value_against(LEDUC, uniform, solved, 0) == pytest.approx(-0.823, abs=3e-3)
    assert value_against(LEDUC, uniform, solved, 1) == pytest.approx(-0.592, abs=3e-3)
    assert exploitability(LEDUC, uniform) == pytest.approx(2.374, abs=1e-3)
    assert exploitability(LEDUC, solved) < 2e-3


@pytest.mark.parametrize(("seat", "published"), [(0, 0.42), (1, 0.0)])
def test_perfect_play_against_mcts_100(seat: int, published: float) -> None:
    result = play_matches(BOARD, PerfectPlayer(BOARD), MctsPlayer(BOARD, 100), seat, 150, seed=1)
    agrees(result.returns, published, 100)
    assert result.returns.min() == 0  # perfect play never loses


@pytest.mark.parametrize(("seat", "published"), [(0, -0.87), (1, -0.98)])
def test_random_play_against_mcts_100(seat: int, published: float) -> None:
    agrees(play_matches(BOARD, RandomPlayer(), MctsPlayer(BOARD, 100), seat, 150, seed=2).returns, published, 100)


@pytest.mark.parametrize(("seat", "published"), [(0, -0.93), (1, -1.0)])
def test_random_play_against_mcts_10_in_connect_four(seat: int, published: float) -> None:
    game = get_game("connect-four")
    agrees(play_matches(game, RandomPlayer(), MctsPlayer(game, 10), seat, 100, seed=3).returns, published, 60)


@pytest.mark.parametrize(("name", "published"), [("mini-hanabi", 1.47), ("simple-hanabi", 1.60)])
def test_random_hanabi_scores(name: str, published: float) -> None:
    result = play_matches(get_game(name), RandomPlayer(), RandomPlayer(), 0, 1500, seed=4)
    agrees(result.returns, published, 2000)


@pytest.mark.parametrize("name", ["kuhn", "leduc", "kuhn3", "liars-dice"])
def test_exact_values_and_best_responses_agree_with_openspiel(name: str) -> None:
    game, table, other = get_game(name), random_table(name, 1), random_table(name, 2)
    spiel = load(game)
    states = decision_states(game)

    def policy(rows: PolicyTable) -> pyspiel.TabularPolicy:
        return pyspiel.TabularPolicy(
            {k: list(zip(states[k].legal_actions(), row.tolist(), strict=True)) for k, row in rows.items()}
        )

    seats = spiel.num_players()
    policies = [policy(table)] + [policy(other)] * (seats - 1)
    expected = pyspiel.expected_returns(spiel.new_initial_state(), policies, -1, False)[0]
    assert value_against(game, table, other, 0) == pytest.approx(expected, abs=1e-9)
    assert exploitability(game, table) == pytest.approx(pyspiel.exploitability(spiel, policy(table)), abs=1e-9)
    value, response = best_response(game, [other] * seats, 0)
    assert value_against(game, other | response, other, 0) == pytest.approx(value, abs=1e-9)
    worst, best = score_range(game, other, 0)
    assert best == value
    assert worst < value_against(game, table, other, 0) < best


def test_a_row_that_lacks_mass_loses_that_part_of_its_games() -> None:
    """Hand-worked: who never answers legally at its first move loses 2 in Kuhn; half of that is half way to it."""
    uniform = uniform_table(KUHN)
    mute = {infoset: row * 0.0 for infoset, row in uniform.items()}
    half = {infoset: row * (0.5 if len(infoset) == 1 else 1.0) for infoset, row in uniform.items()}
    assert value_against(KUHN, mute, uniform, 0) == pytest.approx(-2.0)
    assert value_against(KUHN, half, uniform, 0) == pytest.approx(0.5 * -2.0 + 0.5 * 0.125)
    tree = game_tree(KUHN)
    seat1 = tree.values([tree.flat(uniform), tree.flat(mute)])
    np.testing.assert_allclose(seat1, [2.0, -2.0])
    tree3 = game_tree(get_game("kuhn3"))
    mute3 = tree3.flat({infoset: row * 0.0 for infoset, row in uniform_table(get_game("kuhn3")).items()})
    np.testing.assert_allclose(tree3.values([mute3] * 3), [-2.0, 1.0, 1.0])


def test_values_of_many_policies_at_once_are_those_of_each(kuhn_solved: PolicyTable) -> None:
    tree = game_tree(KUHN)
    flats = np.stack([tree.flat(random_table("kuhn", seed)) for seed in range(5)])
    solved = tree.flat(kuhn_solved)
    together = tree.values([flats, solved])
    for row, flat in zip(together, flats, strict=True):
        np.testing.assert_allclose(row, tree.values([flat, solved]))


def test_a_pool_draws_one_opponent_a_game_by_weight() -> None:
    pool = Pool([FirstLegalPlayer(), RandomPlayer()], [3, 1])
    drawn = [pool.draw(np.random.default_rng((7, index, 1))).name for index in range(400)]
    assert 0.68 < drawn.count("first-legal") / 400 < 0.82
    mixed = play_matches(BOARD, FirstLegalPlayer(), pool, 0, 60, seed=7).returns
    pure = play_matches(BOARD, FirstLegalPlayer(), FirstLegalPlayer(), 0, 1, seed=7).returns[0]
    alone = [index for index in range(60) if drawn[index] == "first-legal"]
    assert (mixed[alone] == pure).all()  # such a game has only one course: the drawn opponent made every move
    assert set(mixed) != {pure}


def test_search_opponents_say_where_they_cannot_play() -> None:
    with pytest.raises(ConfigError, match="kuhn has hidden information"):
        MctsPlayer(KUHN, 10)
    with pytest.raises(ConfigError, match="simulations 0"):
        MctsPlayer(BOARD, 0)
    with pytest.raises(ConfigError, match="only tic-tac-toe"):
        PerfectPlayer(get_game("connect-four"))
    with pytest.raises(ConfigError, match="positive weight"):
        Pool([RandomPlayer()], [0.0])


@pytest.mark.parametrize("opponent", [RandomPlayer(), FirstLegalPlayer(), MctsPlayer(BOARD, 5, 1)])
def test_long_matches_do_not_depend_on_how_they_are_shared_out(opponent: Player) -> None:
    whole = play_long(BOARD, RandomPlayer(), opponent, 1, 230, seed=5)
    assert len(whole.returns) == 230
    parts = [play_matches(BOARD, RandomPlayer(), opponent, 1, n, 5, at) for at, n in ((200, 30), (0, 100), (100, 100))]
    np.testing.assert_array_equal(whole.returns, np.concatenate([parts[i].returns for i in (1, 2, 0)]))


def test_a_table_player_draws_from_its_table() -> None:
    table = {infoset: np.array([0.2, 0.8]) for infoset in uniform_table(KUHN)}
    state = decision_states(KUHN)["0"]
    seen = decision(KUHN, state)
    moves = TablePlayer(table, "t").act([seen] * 4000, [state] * 4000, np.random.default_rng(0))
    assert sum(move.text == "bet" for move in moves) / 4000 == pytest.approx(0.8, abs=0.025)
