"""Opponents that search: Monte-Carlo tree search, perfect play of small board games, exact best responses, pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyspiel

from common.config import ConfigError
from strat_reasoner.evaluate_tree import game_tree
from strat_reasoner.games import Decision, Game, Move, Player, load
from strat_reasoner.games.tic_tac_toe import LINES, MARKS, board
from strat_reasoner.opponents import PolicyTable, move_at

MAX_MEMORY_MB = 200


class FirstLegalPlayer:
    """Always plays the first legal move: the simplest deterministic opponent."""

    name = "first-legal"
    reads_prompt = False

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        return [move_at(decision, 0) for decision in decisions]


class MctsPlayer:
    """UCT with random rollouts (OpenSpiel's C++ search), for games without hidden information.

    Each move is searched from nothing with a seed from the caller's generator, so it depends on no other game.

    Args:
        simulations: simulations per move.
        rollouts: random rollouts per evaluated leaf.
        uct_c: exploration constant.
    """

    reads_prompt = False

    def __init__(self, game: Game, simulations: int, rollouts: int = 10, uct_c: float = 2.0) -> None:
        if simulations < 1 or rollouts < 1:
            raise ConfigError(f"mcts: simulations {simulations} and rollouts {rollouts} must be at least 1")
        if load(game).get_type().information != pyspiel.GameType.Information.PERFECT_INFORMATION:
            raise ConfigError(f"mcts: {game.name} has hidden information, which this search would look at")
        self.game, self.simulations, self.rollouts, self.uct_c = game, simulations, rollouts, uct_c
        self.name = f"mcts-{simulations}"

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        seeds = rng.integers(2**31, size=len(states)).tolist()
        moves = []
        for seen, state, seed in zip(decisions, states, seeds, strict=True):
            evaluator = pyspiel.RandomRolloutEvaluator(self.rollouts, seed)
            bot = pyspiel.MCTSBot(
                load(self.game), evaluator, self.uct_c, self.simulations, MAX_MEMORY_MB, False, seed, False
            )
            moves.append(move_at(seen, seen.legal.index(bot.step(state))))
        return moves


class PerfectPlayer:
    """Minimax over the whole game, equal moves with equal probability: tic-tac-toe, not Connect Four."""

    name = "perfect"
    reads_prompt = False

    def __init__(self, game: Game) -> None:
        if game.name != "tic-tac-toe":
            raise ConfigError(f"perfect: only tic-tac-toe is small enough for it, not {game.name}")

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        moves = []
        for seen, state in zip(decisions, states, strict=True):
            squares, own, other = board(state, seen.seat), MARKS[seen.seat], MARKS[1 - seen.seat]
            values = [_minimax(squares[:i] + own + squares[i + 1 :], other) for i in seen.legal]
            worth = np.array(values) * (1 - 2 * seen.seat)
            moves.append(move_at(seen, int(rng.choice(np.flatnonzero(worth == worth.max())))))
        return moves


@functools.cache
def _minimax(squares: str, mover: str) -> int:
    """Value for x of nine squares with `mover` to move: 5,478 positions in all."""
    other = "o" if mover == "x" else "x"
    if any(all(squares[i] == other for i in line) for line in LINES):
        return 1 if other == "x" else -1
    empty = [i for i, mark in enumerate(squares) if mark == "."]
    values = [_minimax(squares[:i] + mover + squares[i + 1 :], other) for i in empty]
    if not values:
        return 0
    return max(values) if mover == "x" else min(values)


def best_response(game: Game, tables: Sequence[PolicyTable], seat: int) -> tuple[float, PolicyTable]:
    """The exact best response of `seat` to the other seats' tables: its value and its table.

    Args:
        tables: one per seat; that of `seat` is not read.
    """
    tree = game_tree(game)
    return tree.best_response([tree.flat(table) for table in tables], seat)


class Pool:
    """A weighted set of opponents: each game draws one of them for all its moves.

    Args:
        members: the opponents.
        weights: positive numbers, scaled to sum to one.
    """

    def __init__(self, members: Sequence[Player], weights: Sequence[float]) -> None:
        if len(members) != len(weights) or not members or min(weights) <= 0:
            raise ConfigError("pool: give at least one opponent, and a positive weight for each")
        self.members = tuple(members)
        self.weights = np.array(weights) / sum(weights)
        self.name = "+".join(f"{w:.2g}*{m.name}" for m, w in zip(members, self.weights, strict=True))

    def draw(self, rng: np.random.Generator) -> Player:
        """The opponent of one game."""
        return self.members[int(rng.choice(len(self.members), p=self.weights))]

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """A pool's own moves: every decision by a member drawn for it. Matches draw once per game instead."""
        moves: list[Move] = []
        for seen, state in zip(decisions, states, strict=True):
            moves += self.draw(rng).act([seen], [state], rng)
        return moves
