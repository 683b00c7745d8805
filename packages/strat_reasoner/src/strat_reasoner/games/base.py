"""One small interface over OpenSpiel games: what a player sees, what it may do, how its words become a move.

OpenSpiel owns the rules. A game here adds two things for language models: a rendering of the information state
as text, and names for the moves. Everything else (evaluation, rollouts, opponents) works on `Decision` and `Player`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Decision:
    """What one player sees when it must act. Two states that the player cannot tell apart give equal decisions."""

    game: str
    seat: int
    infoset: str
    """OpenSpiel's information-state string (`Game.infoset`): the key of a policy table."""
    legal: tuple[int, ...]
    """OpenSpiel action ids, ascending."""
    words: tuple[str, ...]
    """The name of each legal action, in the order of `legal`."""
    facts: str
    """The observation in at most 12 words separated by spaces, for word-level models: `hold Q facing bet`."""
    prompt: str
    """The full text for a language model: role, rules, observation, history, legal moves."""


@dataclass(frozen=True)
class Move:
    """A player's answer to a decision."""

    action: int | None
    """OpenSpiel action id; None when the answer was no legal move (such a player loses at once)."""
    text: str = ""
    """All that the player wrote, reasoning included."""
    well_formed: bool = True
    """Whether the answer kept the required format."""


class Player(Protocol):
    """Anything that plays. Players are batched: one call decides for many games at once.

    A class that says `reads_prompt = False` is given decisions without their prompt in matches, which is faster.
    """

    name: str

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """One move per decision. `states` are OpenSpiel states, for search players only: models must not look."""
        ...


def information_state(state: Any, seat: int) -> str:
    """OpenSpiel's information-state string."""
    return str(state.information_state_string(seat))


def observation(state: Any, seat: int) -> str:
    """OpenSpiel's observation string, for the games that have no information-state string."""
    return str(state.observation_string(seat))


@dataclass(frozen=True)
class Game:
    """An OpenSpiel game with its text. Registered by name in `strat_reasoner.games`."""

    name: str
    spiel_name: str
    """What `pyspiel.load_game` takes, parameters included."""
    render_facts: Callable[[Any, int], str]
    """(state, seat) → `Decision.facts`."""
    render_prompt: Callable[[Any, int], str]
    """(state, seat) → `Decision.prompt`."""
    action_word: Callable[[Any, int, int], str]
    """(state, seat, action) → the move's name, unique among the legal moves of that state."""
    words: tuple[str, ...]
    """Every word that `facts` and the moves' names are made of: the game's part of a word-level vocabulary."""
    intents: tuple[str, ...]
    """The intents that a player can state, for word-level models and their warm start."""
    intent: Callable[[Any, int, int], str]
    """(state, seat, action) → the intent that such a move usually has, one of `intents`."""
    shared_reward: bool = False
    """Cooperative games give every seat the same return."""
    tabular: bool = False
    """Whether the whole tree is small enough for tables: exact values, best responses, equilibrium."""
    infoset: Callable[[Any, int], str] = information_state
    """(state, seat) → `Decision.infoset`; the observation where OpenSpiel has no information-state string."""
