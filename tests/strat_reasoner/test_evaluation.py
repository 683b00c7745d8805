"""Games and evaluation against published values (OpenSpiel 2.0.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strat_reasoner.evaluate import (
    EstimatedTable,
    bootstrap,
    bootstrap_gain,
    exploitability,
    play_matches,
    value_against,
    wilson,
)
from strat_reasoner.games import Decision, Move, decision, get_game, load
from strat_reasoner.opponents import (
    PolicyTable,
    RandomPlayer,
    TablePlayer,
    decision_states,
    equilibrium,
    mix,
    uniform_table,
)

KUHN = get_game("kuhn")


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> PolicyTable:
    return equilibrium(KUHN, cache_dir=tmp_path_factory.mktemp("cache"))


def test_kuhn_values_are_the_published_ones(solved: PolicyTable) -> None:
    uniform = uniform_table(KUHN)
    assert value_against(KUHN, solved, solved, 0) == pytest.approx(-1 / 18, abs=1e-3)
    assert value_against(KUHN, uniform, solved, 0) == pytest.approx(-0.1667, abs=1e-3)
    assert value_against(KUHN, uniform, solved, 1) == pytest.approx(-0.1296, abs=1e-3)
    assert value_against(KUHN, uniform, uniform, 0) == pytest.approx(0.125, abs=1e-9)
    assert exploitability(KUHN, uniform) == pytest.approx(0.4583, abs=1e-4)
    assert exploitability(KUHN, solved) < 1e-3


def test_the_equilibrium_is_cached_and_a_broken_cache_is_made_anew(tmp_path: Path) -> None:
    first = equilibrium(KUHN, 50, tmp_path)
    file = next(tmp_path.glob("cfr_plus-kuhn-*.json"))
    file.write_text("not json")
    again = equilibrium(KUHN, 50, tmp_path)
    assert all(np.allclose(first[infoset], again[infoset]) for infoset in first)


def test_all_twelve_decisions_have_distinct_texts_within_the_vocabulary() -> None:
    decisions = [decision(KUHN, state) for state in decision_states(KUHN).values()]
    assert len(decisions) == 12
    assert len({(d.seat, d.facts) for d in decisions}) == 12
    assert len({d.prompt for d in decisions}) == 12
    assert {word for d in decisions for word in d.facts.split()} <= set(KUHN.words)
    assert all(d.words == ("pass", "bet") for d in decisions)
    for state in decision_states(KUHN).values():
        for action in state.legal_actions():
            assert KUHN.intent(state, state.current_player(), action) in KUHN.intents


def test_played_games_agree_with_the_exact_value(solved: PolicyTable) -> None:
    result = play_matches(KUHN, RandomPlayer(), TablePlayer(solved, "equilibrium"), 1, 4000, seed=3)
    interval = result.mean_return(np.random.default_rng(0))
    assert interval.low < -0.1296 < interval.high
    assert result.win_rate.low < (result.returns > 0).mean() < result.win_rate.high
    assert result.illegal == 0


def test_the_same_seed_deals_the_same_cards_to_two_players(solved: PolicyTable) -> None:
    """Against itself a deterministic player gets equal returns twice; the seeds are per game."""
    opponent = TablePlayer(solved, "equilibrium")
    first, again = (play_matches(KUHN, RandomPlayer(), opponent, 0, 50, seed=1).returns for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, play_matches(KUHN, RandomPlayer(), opponent, 0, 50, seed=2).returns)


class _Mute:
    """Never makes a legal move."""

    name = "mute"

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        return [Move(None, "...", False) for _ in decisions]


def test_a_player_without_a_legal_move_loses_at_once() -> None:
    result = play_matches(KUHN, _Mute(), RandomPlayer(), 0, 20, seed=0)
    assert result.illegal == 20
    assert (result.returns == load(KUHN).min_utility()).all()
    other = play_matches(KUHN, RandomPlayer(), _Mute(), 0, 20, seed=0)
    assert other.illegal == 0
    assert (other.returns > 0).all()


def noisy_samples(table: PolicyTable, n: int, rng: np.random.Generator) -> EstimatedTable:
    """Rows that scatter around the table, as reasonings do."""
    return EstimatedTable(
        {
            infoset: np.array([row * 0.5 + 0.5 * rng.dirichlet(row * 4 + 0.01) for _ in range(n)])
            for infoset, row in table.items()
        }
    )


def test_intervals_cover_the_exact_value_and_a_gain_is_told_from_none(solved: PolicyTable) -> None:
    rng = np.random.default_rng(5)
    weak, strong = uniform_table(KUHN), mix(solved, uniform_table(KUHN), 0.5)

    def measure(table: PolicyTable) -> float:
        return value_against(KUHN, table, solved, 1)

    estimate = noisy_samples(strong, 200, rng)
    interval = bootstrap(measure, estimate, rng, 100)
    exact = measure({infoset: rows.mean(0) for infoset, rows in estimate.samples.items()})
    assert interval.low < exact < interval.high
    gain = bootstrap_gain(measure, noisy_samples(weak, 200, rng), estimate, rng, 100)
    assert gain.low > 0
    none = bootstrap_gain(measure, noisy_samples(strong, 200, rng), estimate, rng, 100)
    assert none.low < 0 < none.high


def test_moves_that_are_not_legal_are_counted_and_the_rest_is_scaled() -> None:
    table = EstimatedTable({"0": np.array([[0.4, 0.4], [0.0, 0.0]]), "1": np.array([[1.0, 0.0], [1.0, 0.0]])})
    assert table.illegal_rate == pytest.approx((0.6 + 0) / 2)
    np.testing.assert_allclose(table.table()["0"], [0.5, 0.5])


def test_wilson_matches_a_published_example() -> None:
    """Newcombe 1998, table I: 81 of 263, 95 % interval 0.2553 to 0.3662."""
    interval = wilson(81, 263)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 10).low == 0
