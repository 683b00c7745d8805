"""Exact values of policy tables: the game tree flattened once into arrays, then every value is a few numpy products.

A policy is one flat vector: for each information state the probabilities of its legal moves and, last, the probability
of an answer that is no legal move. That answer ends the game at once: who gave it loses the most that the game can
cost, and the others share that evenly. So the rows of a `PolicyTable` may sum to less than one.

For small games of perfect recall (`Game.tabular`). The values agree with OpenSpiel's (tests).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from strat_reasoner.games import Game, load
from strat_reasoner.opponents import PolicyTable, decision_states


@dataclass(frozen=True)
class GameTree:
    """All ends of a game: T terminal histories, illegal answers included. X entries in a flat policy.

    `path_STD[s]` lists the flat entries that seat s chose on the way to each end, oldest first, padded with X (an entry
    that is always one).
    """

    game: Game
    first: dict[str, int]
    """Information state → its first entry in a flat policy; its moves follow, then the illegal answer."""
    count: dict[str, int]
    """Information state → number of legal moves."""
    chance_T: np.ndarray
    returns_TS: np.ndarray
    path_STD: np.ndarray
    block_X: np.ndarray
    """Number of the information state that an entry belongs to."""
    illegal_X: np.ndarray
    """Whether an entry is the illegal answer."""

    @property
    def size(self) -> int:
        """X."""
        return len(self.block_X)

    def flat(self, table: PolicyTable) -> np.ndarray:
        """A table as one vector; what a row lacks to one is the probability of an illegal answer."""
        values = np.zeros(self.size)
        for infoset, row in table.items():
            at = self.first[infoset]
            values[at : at + len(row)] = row
            values[at + len(row)] = max(0.0, 1.0 - float(row.sum()))
        return values

    def table(self, flat: np.ndarray) -> PolicyTable:
        """The legal part of a flat vector."""
        return {infoset: flat[at : at + self.count[infoset]] for infoset, at in self.first.items()}

    def reach(self, flat_BX: np.ndarray, seat: int) -> np.ndarray:
        """Probability that `seat` plays towards each end: shape B x T."""
        padded = np.concatenate([flat_BX, np.ones((*flat_BX.shape[:-1], 1))], axis=-1)
        reach = np.ones((*flat_BX.shape[:-1], len(self.chance_T)))
        for column in self.path_STD[seat].T:
            reach *= padded[..., column]
        return reach

    def values(self, policies: list[np.ndarray]) -> np.ndarray:
        """Expected return of every seat.

        Args:
            policies: one flat policy per seat, each of shape (X,) or (B, X); shapes are broadcast.

        Returns:
            Shape (S,) or (B, S).
        """
        weight: np.ndarray = self.chance_T
        for seat, flat in enumerate(policies):
            weight = weight * self.reach(flat, seat)
        return weight @ self.returns_TS

    def best_responses(self, policies: list[np.ndarray], seat: int, sign: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """The exact best response of `seat` to the other seats' flat policies, for many policies at once.

        Works back from the last own decision: with perfect recall all histories of an information state share the own
        past, so entries can be compared by the return that they lead to, weighted with what chance and the others do.

        Args:
            policies: one flat policy (B, X) per seat; that of `seat` is not read.
            sign: -1 gives the worst response (it never gives an illegal answer either).

        Returns:
            Expected returns (B,), and the responses as flat policies (B, X).
        """
        batch = len(policies[seat - 1])
        value_BT = np.tile(sign * self.chance_T * self.returns_TS[:, seat], (batch, 1))
        for other, flat in enumerate(policies):
            if other != seat:
                value_BT *= self.reach(flat, other)
        starts = np.flatnonzero(np.diff(self.block_X, prepend=-1))
        choice_BX = np.zeros((batch, self.size))
        for column in self.path_STD[seat].T[::-1]:
            here = column < self.size
            if not here.any():
                continue
            entries = column[here] + self.size * np.arange(batch)[:, None]
            worth = np.bincount(entries.ravel(), value_BT[:, here].ravel(), minlength=batch * self.size)
            worth_BX = np.where(self.illegal_X, -np.inf, worth.reshape(batch, self.size))
            highest = np.maximum.reduceat(worth_BX, starts, axis=1)[:, self.block_X]
            candidates = np.where(worth_BX == highest, np.arange(self.size), self.size)
            best = np.minimum.reduceat(candidates, starts, axis=1)[:, np.unique(self.block_X[column[here]])]
            np.put_along_axis(choice_BX, best, 1.0, axis=1)
            value_BT[:, here] *= choice_BX[:, column[here]]
        return sign * value_BT.sum(1), choice_BX

    def best_response(self, policies: list[np.ndarray], seat: int, sign: float = 1.0) -> tuple[float, PolicyTable]:
        """As `best_responses` for one flat policy (X,) per seat: the value, and the response as a table."""
        values, choices = self.best_responses([flat[None] for flat in policies], seat, sign)
        states = decision_states(self.game)
        table = {k: row for k, row in self.table(choices[0]).items() if states[k].current_player() == seat}
        return float(values[0]), table

    def exploitability(self, flat_BX: np.ndarray) -> np.ndarray:
        """NashConv / seats of each policy: what best responses gain over it on average. Shape (B,)."""
        seats = self.returns_TS.shape[1]
        best = sum(self.best_responses([flat_BX] * seats, seat)[0] for seat in range(seats))
        gain: np.ndarray = (best - self.values([flat_BX] * seats).sum(-1)) / seats
        return gain


@functools.cache
def game_tree(game: Game) -> GameTree:
    """Flatten a small game (seconds for the largest; kept for the life of the process)."""
    first: dict[str, int] = {}
    count: dict[str, int] = {}
    blocks: list[int] = []
    illegal: list[bool] = []
    for number, (infoset, state) in enumerate(decision_states(game).items()):
        moves = len(state.legal_actions())
        first[infoset], count[infoset] = len(blocks), moves
        blocks += [number] * (moves + 1)
        illegal += [False] * moves + [True]
    spiel = load(game)
    seats = spiel.num_players()
    ends: list[tuple[float, list[float], list[list[int]]]] = []

    def walk(state: Any, chance: float, paths: list[list[int]]) -> None:
        if state.is_terminal():
            ends.append((chance, state.returns(), paths))
        elif state.is_chance_node():
            for action, probability in state.chance_outcomes():
                walk(state.child(action), chance * probability, paths)
        else:
            seat, infoset = state.current_player(), state.information_state_string()
            extended = [[*paths[seat], first[infoset] + i] for i in range(count[infoset] + 1)]
            for action, path in zip(state.legal_actions(), extended, strict=False):
                walk(state.child(action), chance, [*paths[:seat], path, *paths[seat + 1 :]])
            loss = illegal_returns(seats, seat, spiel.min_utility())
            ends.append((chance, loss, [*paths[:seat], extended[-1], *paths[seat + 1 :]]))

    walk(spiel.new_initial_state(), 1.0, [[] for _ in range(seats)])
    depth = max(len(path) for _, _, paths in ends for path in paths)
    path_STD = np.full((seats, len(ends), depth), len(blocks))
    for t, (_, _, paths) in enumerate(ends):
        for s, path in enumerate(paths):
            path_STD[s, t, : len(path)] = path
    return GameTree(
        game=game,
        first=first,
        count=count,
        chance_T=np.array([end[0] for end in ends]),
        returns_TS=np.array([end[1] for end in ends]),
        path_STD=path_STD,
        block_X=np.array(blocks),
        illegal_X=np.array(illegal),
    )


def illegal_returns(seats: int, loser: int, worst: float) -> list[float]:
    """Returns when `loser` gives an answer that is no legal move: the worst, and the others share it evenly."""
    share = -worst / (seats - 1) if worst < 0 else 0.0
    return [worst if seat == loser else share for seat in range(seats)]
