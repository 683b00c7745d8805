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

    def _reach(self, flat_BX: np.ndarray, seat: int) -> np.ndarray:
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
            weight = weight * self._reach(flat, seat)
        return weight @ self.returns_TS

    def best_response(self, policies: list[np.ndarray], seat: int, sign: float = 1.0) -> tuple[float, PolicyTable]:
        """The exact best response of `seat` to the other seats' flat policies, and its expected return.

        Works back from the last own decision: with perfect recall all histories of an information state share the own
        past, so entries can be compared by the return that they lead to, weighted with what chance and the others do.

        Args:
            policies: one flat policy (X,) per seat; that of `seat` is not read.
            sign: -1 gives the worst response (it never gives an illegal answer either).
        """
        value_T = sign * self.chance_T * self.returns_TS[:, seat]
        for other, flat in enumerate(policies):
            if other != seat:
                value_T = value_T * self._reach(flat, other)
        path_TD = self.path_STD[seat]
        choice_X = np.zeros(self.size + 1)
        for column in path_TD.T[::-1]:
            here = column < self.size
            if not here.any():
                continue
            worth = np.bincount(column[here], value_T[here], minlength=self.size)
            worth[self.illegal_X] = -np.inf
            reached = np.unique(self.block_X[column[here]])
            best = self._best_entries(worth, reached)
            choice_X[best] = 1.0
            value_T = np.where(here, value_T * choice_X[column], value_T)
        return sign * float(value_T.sum()), self._as_table(choice_X[:-1], seat)

    def _best_entries(self, worth: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """The entry of greatest worth in each block; the first of equals."""
        order = np.lexsort((np.arange(self.size), -worth, self.block_X))
        starts = np.searchsorted(self.block_X[order], blocks)
        best: np.ndarray = order[starts]
        return best

    def _as_table(self, flat: np.ndarray, seat: int) -> PolicyTable:
        states = decision_states(self.game)
        return {k: row for k, row in self.table(flat).items() if states[k].current_player() == seat}

    def nash_conv(self, flat: np.ndarray) -> float:
        """What best responses gain over the policy, summed over the seats."""
        seats = self.returns_TS.shape[1]
        own = self.values([flat] * seats)
        return sum(self.best_response([flat] * seats, seat)[0] - float(own[seat]) for seat in range(seats))


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
