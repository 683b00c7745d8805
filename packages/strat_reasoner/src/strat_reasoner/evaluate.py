"""How well a policy plays, with intervals; exact where the game is small enough.

A model's policy is a random text followed by a move. Its table is estimated at every information state: sample
reasonings, and for each take the exact probability of every legal move given that reasoning (Rao-Blackwell), which
varies far less than drawn moves. From the table the flattened tree gives values and exploitability
exactly; what remains is the sampling error of the table, and the bootstrap over the samples carries it through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from strat_reasoner.evaluate_intervals import BOOTSTRAPS, Interval, bootstrap_mean, percentile_interval, wilson
from strat_reasoner.evaluate_matches import MatchResult, play_matches
from strat_reasoner.evaluate_tree import game_tree
from strat_reasoner.games import Decision, Game, Player, decision, load
from strat_reasoner.opponents import PolicyTable, decision_states

__all__ = [
    "EstimatedTable",
    "Interval",
    "MatchResult",
    "TabularPlayer",
    "bootstrap",
    "bootstrap_gain",
    "bootstrap_mean",
    "estimate_table",
    "exploitability",
    "exploitability_interval",
    "play_matches",
    "score_range",
    "value_against",
    "value_interval",
    "wilson",
]


class TabularPlayer(Protocol):
    """A player whose move probabilities can be had given its own sampled reasoning."""

    def action_probabilities(
        self, decisions: Sequence[Decision], samples: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Per decision an array (samples, legal actions); rows sum to at most 1, the rest is no legal move."""
        ...


@dataclass(frozen=True)
class EstimatedTable:
    """A policy table with the samples it comes from: information state → array (samples, legal actions).

    `counting_illegal` decides what `table` and `resampled` do with the probability of an answer that is no legal move:
    leave it out of the row, which then sums to less than one and loses the game for that part (the true value of the
    player); or scale it away (the policy given that it makes a legal move).
    """

    samples: dict[str, np.ndarray]
    counting_illegal: bool = False

    def table(self) -> PolicyTable:
        """Mean over the samples."""
        return {infoset: self._row(rows.mean(0)) for infoset, rows in self.samples.items()}

    def resampled(self, rng: np.random.Generator) -> PolicyTable:
        """A bootstrap replicate: samples drawn with replacement at each information state."""
        return {
            infoset: self._row(rows[rng.integers(len(rows), size=len(rows))].mean(0))
            for infoset, rows in self.samples.items()
        }

    def replicates(self, game: Game, rng: np.random.Generator, n: int = BOOTSTRAPS) -> np.ndarray:
        """`n` bootstrap replicates as flat policies of the game's tree: shape (n, X)."""
        tree = game_tree(game)
        flats = np.zeros((n, tree.size))
        for infoset, rows in self.samples.items():
            at, moves = tree.first[infoset], tree.count[infoset]
            drawn = _resampled_means(rows, rng, n)
            if not self.counting_illegal:
                total = drawn.sum(1, keepdims=True)
                drawn = np.where(total > 0, drawn / np.where(total > 0, total, 1), 1 / moves)
            flats[:, at : at + moves] = drawn
            flats[:, at + moves] = np.maximum(0, 1 - drawn.sum(1))
        return flats

    def _row(self, row: np.ndarray) -> np.ndarray:
        if self.counting_illegal:
            return row
        total = row.sum()
        return row / total if total > 0 else np.full(len(row), 1 / len(row))

    @property
    def illegal_rate(self) -> float:
        """Probability of an answer that is no legal move, averaged over the information states."""
        return float(np.mean([1 - rows.sum(1).mean() for rows in self.samples.values()]))


def _resampled_means(rows: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Means of `n` draws of the rows with replacement, by counting how often each is drawn: shape (n, columns)."""
    size = len(rows)
    drawn = rng.integers(size, size=(n, size), dtype=np.int32) + size * np.arange(n, dtype=np.int32)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=n * size).reshape(n, size)
    means: np.ndarray = counts @ rows / size
    return means


def estimate_table(
    player: TabularPlayer | Player,
    game: Game,
    samples: int,
    rng: np.random.Generator,
    counting_illegal: bool = False,
) -> EstimatedTable:
    """Estimate the player's policy at every information state of a small game.

    A player without `action_probabilities` is asked for `samples` moves at each; its rows are then zeros and ones.
    """
    states = decision_states(game)
    decisions = [decision(game, state) for state in states.values()]
    if hasattr(player, "action_probabilities"):
        rows = player.action_probabilities(decisions, samples, rng)
    else:
        rows = _drawn_moves(player, decisions, list(states.values()), samples, rng)
    return EstimatedTable(dict(zip(states, rows, strict=True)), counting_illegal)


def _drawn_moves(
    player: Player, decisions: list[Decision], states: list[Any], samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    moves = player.act(
        [seen for seen in decisions for _ in range(samples)], [state for state in states for _ in range(samples)], rng
    )
    rows = [np.zeros((samples, len(seen.legal))) for seen in decisions]
    for number, move in enumerate(moves):
        if move.action is not None:
            at = number // samples
            rows[at][number % samples, decisions[at].legal.index(move.action)] = 1.0
    return rows


# -- exact values of tables ----------------------------------------------------------------------------------------


def exploitability(game: Game, table: PolicyTable) -> float:
    """NashConv / players: what best responses gain on average. A row may sum to less than one (see evaluate_tree)."""
    tree = game_tree(game)
    return float(tree.exploitability(tree.flat(table)[None])[0])


def value_against(game: Game, table: PolicyTable, opponent: PolicyTable, seat: int) -> float:
    """Expected return of `table` in `seat`, every other seat playing `opponent`."""
    tree = game_tree(game)
    own, other = tree.flat(table), tree.flat(opponent)
    return float(tree.values([own if s == seat else other for s in range(tree.returns_TS.shape[1])])[seat])


def score_range(game: Game, opponent: PolicyTable | None, seat: int) -> tuple[float, float]:
    """The worst and the best return that `seat` can have: the ends of the normalised score.

    Against a table: the exact worst and best response to it. Otherwise the game's utility range.
    """
    if opponent is None:
        spiel = load(game)
        return spiel.min_utility(), spiel.max_utility()
    tree = game_tree(game)
    policies = [tree.flat(opponent)] * tree.returns_TS.shape[1]
    return tree.best_response(policies, seat, sign=-1.0)[0], tree.best_response(policies, seat)[0]


# -- intervals -----------------------------------------------------------------------------------------------------


def bootstrap(
    measure: Callable[[PolicyTable], float], estimate: EstimatedTable, rng: np.random.Generator, n: int = BOOTSTRAPS
) -> Interval:
    """`measure` of the table, with a percentile bootstrap interval over the table's samples."""
    draws = [measure(estimate.resampled(rng)) for _ in range(n)]
    return percentile_interval(measure(estimate.table()), np.array(draws))


def value_interval(
    game: Game, estimate: EstimatedTable, opponent: PolicyTable, seat: int, rng: np.random.Generator
) -> Interval:
    """Exact value of the estimated table in `seat` against `opponent`, with the table's sampling error."""
    tree, flats, other = game_tree(game), estimate.replicates(game, rng), game_tree(game).flat(opponent)
    policies = [flats if s == seat else other for s in range(tree.returns_TS.shape[1])]
    return percentile_interval(value_against(game, estimate.table(), opponent, seat), tree.values(policies)[:, seat])


def exploitability_interval(game: Game, estimate: EstimatedTable, rng: np.random.Generator) -> Interval:
    """Exploitability of the estimated table, with the table's sampling error.

    A best response also exploits the sampling error, so the plain estimate is too high, the more the nearer the policy
    is to an equilibrium. The bootstrap shows by how much (b, the mean of the replicates minus the estimate): the value
    is lowered by b, and the low end of the percentile interval by 2 b. Coverage: docs/evaluation.md.
    """
    draws = game_tree(game).exploitability(estimate.replicates(game, rng))
    plain = exploitability(game, estimate.table())
    bias = max(0.0, float(draws.mean()) - plain)
    percentiles = percentile_interval(plain, draws)
    return Interval(max(0.0, plain - bias), max(0.0, percentiles.low - 2 * bias), percentiles.high)


def bootstrap_gain(
    measure: Callable[[PolicyTable], float],
    before: EstimatedTable,
    after: EstimatedTable,
    rng: np.random.Generator,
    n: int = BOOTSTRAPS,
) -> Interval:
    """measure(after) - measure(before) with its interval; the two tables are resampled independently."""
    draws = [measure(after.resampled(rng)) - measure(before.resampled(rng)) for _ in range(n)]
    return percentile_interval(measure(after.table()) - measure(before.table()), np.array(draws))
