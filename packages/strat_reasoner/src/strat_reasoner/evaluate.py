"""How well a policy plays, with intervals; exact where the game is small enough.

A model's policy is a random text followed by a move. Its table is estimated at every information state: sample
reasonings, and for each take the exact probability of every legal move given that reasoning (Rao-Blackwell), which
varies far less than drawn moves. From the table OpenSpiel computes values and exploitability exactly; what remains is
the sampling error of the table, and the bootstrap over the samples carries it through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyspiel
from open_spiel.python.algorithms import expected_game_score

from strat_reasoner.games import Decision, Game, Player, decision, load
from strat_reasoner.opponents import PolicyTable, decision_states
from strat_reasoner.rollout import advance_chance

CONFIDENCE = 0.95
BOOTSTRAPS = 500


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class TabularPlayer(Protocol):
    """A player whose move probabilities can be had given its own sampled reasoning."""

    def action_probabilities(
        self, decisions: Sequence[Decision], samples: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Per decision an array (samples, legal actions); rows sum to at most 1, the rest is no legal move."""
        ...


@dataclass(frozen=True)
class EstimatedTable:
    """A policy table with the samples it comes from: information state → array (samples, legal actions)."""

    samples: dict[str, np.ndarray]

    def table(self) -> PolicyTable:
        """Mean over the samples, scaled to sum to 1: the policy given that it makes a legal move."""
        return {infoset: _normalised(rows.mean(0)) for infoset, rows in self.samples.items()}

    def resampled(self, rng: np.random.Generator) -> PolicyTable:
        """A bootstrap replicate: samples drawn with replacement at each information state."""
        return {
            infoset: _normalised(rows[rng.integers(len(rows), size=len(rows))].mean(0))
            for infoset, rows in self.samples.items()
        }

    @property
    def illegal_rate(self) -> float:
        """Probability of an answer that is no legal move, averaged over the information states."""
        return float(np.mean([1 - rows.sum(1).mean() for rows in self.samples.values()]))


def _normalised(row: np.ndarray) -> np.ndarray:
    total = row.sum()
    return row / total if total > 0 else np.full(len(row), 1 / len(row))


def estimate_table(player: TabularPlayer, game: Game, samples: int, rng: np.random.Generator) -> EstimatedTable:
    """Estimate the player's policy at every information state of a small game."""
    states = decision_states(game)
    decisions = [decision(game, state) for state in states.values()]
    rows = player.action_probabilities(decisions, samples, rng)
    return EstimatedTable(dict(zip(states, rows, strict=True)))


# -- exact values of tables ----------------------------------------------------------------------------------------


def exploitability(game: Game, table: PolicyTable) -> float:
    """NashConv / players: what best responses gain on average (OpenSpiel)."""
    return float(pyspiel.exploitability(load(game), _spiel_policy(game, table)))


def value_against(game: Game, table: PolicyTable, opponent: PolicyTable, seat: int) -> float:
    """Expected return of `table` in `seat`, every other seat playing `opponent`."""
    spiel = load(game)
    policies = [_Tabular(spiel, table if s == seat else opponent) for s in range(spiel.num_players())]
    return float(expected_game_score.policy_value(spiel.new_initial_state(), policies)[seat])


class _Tabular:
    """The part of OpenSpiel's Policy interface that `policy_value` calls."""

    def __init__(self, spiel: Any, table: PolicyTable) -> None:
        self.table = table

    def action_probabilities(self, state: Any, player_id: int | None = None) -> dict[int, float]:
        row = self.table[state.information_state_string()]
        return {action: float(p) for action, p in zip(state.legal_actions(), row, strict=True)}


def _spiel_policy(game: Game, table: PolicyTable) -> dict[str, list[tuple[int, float]]]:
    states = decision_states(game)
    return {
        infoset: [(action, float(p)) for action, p in zip(states[infoset].legal_actions(), row, strict=True)]
        for infoset, row in table.items()
    }


# -- intervals -----------------------------------------------------------------------------------------------------


def bootstrap(
    measure: Callable[[PolicyTable], float], estimate: EstimatedTable, rng: np.random.Generator, n: int = BOOTSTRAPS
) -> Interval:
    """`measure` of the table, with a percentile bootstrap interval over the table's samples."""
    draws = [measure(estimate.resampled(rng)) for _ in range(n)]
    return _interval(measure(estimate.table()), np.array(draws))


def bootstrap_gain(
    measure: Callable[[PolicyTable], float],
    before: EstimatedTable,
    after: EstimatedTable,
    rng: np.random.Generator,
    n: int = BOOTSTRAPS,
) -> Interval:
    """measure(after) - measure(before) with its interval; the two tables are resampled independently."""
    draws = [measure(after.resampled(rng)) - measure(before.resampled(rng)) for _ in range(n)]
    return _interval(measure(after.table()) - measure(before.table()), np.array(draws))


def bootstrap_mean(values: np.ndarray, rng: np.random.Generator, n: int = BOOTSTRAPS) -> Interval:
    """The mean of independent values with a percentile bootstrap interval."""
    draws = values[rng.integers(len(values), size=(n, len(values)))].mean(1)
    return _interval(float(values.mean()), draws)


def _interval(value: float, draws: np.ndarray) -> Interval:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def wilson(successes: int, trials: int, z: float = 1.959964) -> Interval:
    """A rate with Wilson's score interval (Wilson 1927)."""
    if trials == 0:
        return Interval(0.0, 0.0, 1.0)
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * float(np.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)))
    return Interval(rate, max(0.0, centre - half), min(1.0, centre + half))


# -- played games --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchResult:
    """Games of one player in one seat."""

    seat: int
    returns: np.ndarray
    illegal: int
    """Games that the player lost by an answer that is no legal move."""

    @property
    def win_rate(self) -> Interval:
        """Share of games with a positive return."""
        return wilson(int((self.returns > 0).sum()), len(self.returns))

    @property
    def draw_rate(self) -> Interval:
        """Share of games with return zero."""
        return wilson(int((self.returns == 0).sum()), len(self.returns))

    def mean_return(self, rng: np.random.Generator) -> Interval:
        """Mean return with a bootstrap interval."""
        return bootstrap_mean(self.returns, rng)


def play_matches(game: Game, player: Player, opponent: Player, seat: int, games: int, seed: int) -> MatchResult:
    """Play `games` games with `player` in `seat` and `opponent` in all other seats, all at once.

    Chance is drawn per game from (seed, game), so two players that meet the same seed get the same deals. A player
    whose answer is no legal move loses the most that the game can cost; the others share that evenly.
    """
    spiel = load(game)
    chance = [np.random.default_rng((seed, index)) for index in range(games)]
    rng = np.random.default_rng((seed, games, seat))
    states = [spiel.new_initial_state() for _ in range(games)]
    returns = np.full(games, np.nan)
    illegal = 0
    while np.isnan(returns).any():
        waiting: dict[bool, list[int]] = {True: [], False: []}
        for index in np.flatnonzero(np.isnan(returns)).tolist():
            state = states[index]
            advance_chance(state, chance[index])
            if state.is_terminal():
                returns[index] = state.returns()[seat]
            else:
                waiting[state.current_player() == seat].append(index)
        for own, indices in waiting.items():
            if not indices:
                continue
            mover = player if own else opponent
            decisions = [decision(game, states[index]) for index in indices]
            for index, move in zip(indices, mover.act(decisions, [states[i] for i in indices], rng), strict=True):
                if move.action is None:
                    illegal += own
                    loss = spiel.min_utility()
                    returns[index] = loss if own else -loss / max(1, spiel.num_players() - 1)
                else:
                    states[index].apply_action(move.action)
    return MatchResult(seat, returns, illegal)
