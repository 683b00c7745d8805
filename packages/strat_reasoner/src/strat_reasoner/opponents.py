"""Players to be measured against: random, a fixed policy table, and the equilibrium by CFR+."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyspiel

from strat_reasoner.games import Decision, Game, Move, load

PolicyTable = dict[str, np.ndarray]
"""Information-state string → probabilities of the legal actions, in ascending order of action id."""

CFR_ITERATIONS = 2000
CACHE_VERSION = 1


class RandomPlayer:
    """Plays each legal move with equal probability."""

    name = "random"
    reads_prompt = False

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        chosen = rng.integers([len(decision.legal) for decision in decisions]).tolist()
        return [move_at(decision, index) for decision, index in zip(decisions, chosen, strict=True)]


class TablePlayer:
    """Draws its moves from a policy table."""

    reads_prompt = False

    def __init__(self, table: PolicyTable, name: str) -> None:
        self.table, self.name = table, name

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        drawn = rng.random(len(decisions))
        return [
            move_at(d, min(int((self.table[d.infoset].cumsum() <= u).sum()), len(d.legal) - 1))
            for d, u in zip(decisions, drawn, strict=True)
        ]


def move_at(decision: Decision, index: int) -> Move:
    """The legal move at `index` of the decision."""
    return Move(decision.legal[index], decision.words[index])


def uniform_table(game: Game) -> PolicyTable:
    """The uniform policy at every information state."""
    return {infoset: np.full(count, 1 / count) for infoset, count in legal_counts(game).items()}


def legal_counts(game: Game) -> dict[str, int]:
    """Information state → number of legal actions, over the whole tree (small games only)."""
    return {infoset: len(state.legal_actions()) for infoset, state in decision_states(game).items()}


@functools.cache
def decision_states(game: Game) -> Mapping[str, Any]:
    """One OpenSpiel state for each information state, in depth-first order of the tree (small games only).

    The states are shared by all callers: clone one before applying an action to it.
    """
    found: dict[str, Any] = {}
    stack = [load(game).new_initial_state()]
    while stack:
        state = stack.pop()
        if state.is_terminal():
            continue
        if not state.is_chance_node():
            found.setdefault(state.information_state_string(), state)
        stack.extend(state.child(action) for action in reversed(state.legal_actions()))
    return MappingProxyType(found)


def equilibrium(game: Game, iterations: int = CFR_ITERATIONS, cache_dir: Path | None = None) -> PolicyTable:
    """A Nash equilibrium by CFR+ (Tammelin 2014; OpenSpiel's solver), average policy, cached on disk.

    Args:
        cache_dir: default `$XDG_CACHE_HOME/stratacross` or `~/.cache/stratacross`.
    """
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stratacross"
    file = folder / f"cfr_plus-{game.name}-{iterations}-v{CACHE_VERSION}.json"
    try:
        return {infoset: np.array(row) for infoset, row in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        pass
    solver = pyspiel.CFRPlusSolver(load(game))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    average = solver.average_policy()
    table = {infoset: _row(average.action_probabilities(state)) for infoset, state in decision_states(game).items()}
    folder.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({infoset: row.tolist() for infoset, row in table.items()}))
    aside.replace(file)
    return table


def _row(probabilities: Mapping[int, float]) -> np.ndarray:
    row = np.array([probabilities[action] for action in sorted(probabilities)])
    return row / row.sum()


def mix(first: PolicyTable, second: PolicyTable, share: float) -> PolicyTable:
    """`share` of the first policy and the rest of the second, at every information state."""
    return {infoset: share * first[infoset] + (1 - share) * second[infoset] for infoset in first}
