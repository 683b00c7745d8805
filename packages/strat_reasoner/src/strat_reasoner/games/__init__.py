"""The games by name. Adding one: a module here with a `Game`, an entry in `_GAMES`, and a test."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import pyspiel

from common.config import ConfigError
from strat_reasoner.games.base import Decision, Game, Move, Player
from strat_reasoner.games.connect_four import CONNECT_FOUR
from strat_reasoner.games.hanabi import MINI_HANABI, SIMPLE_HANABI
from strat_reasoner.games.kuhn import KUHN, KUHN3
from strat_reasoner.games.leduc import LEDUC
from strat_reasoner.games.liars_dice import LIARS_DICE
from strat_reasoner.games.negotiation import NEGOTIATION
from strat_reasoner.games.tic_tac_toe import TIC_TAC_TOE

__all__ = ["Decision", "Game", "Move", "Player", "advance_chance", "decision", "get_game", "load", "names"]

_ALL = (
    KUHN,
    KUHN3,
    LEDUC,
    LIARS_DICE,
    TIC_TAC_TOE,
    CONNECT_FOUR,
    MINI_HANABI,
    SIMPLE_HANABI,
    NEGOTIATION,
)
_GAMES = {game.name: game for game in _ALL}


def names() -> tuple[str, ...]:
    """Names of all games."""
    return tuple(_GAMES)


def get_game(name: str) -> Game:
    """The game called `name`.

    Raises:
        ConfigError: there is none; the text names the nearest.
    """
    if name not in _GAMES:
        near = difflib.get_close_matches(name, _GAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"games are {', '.join(_GAMES)}"
        raise ConfigError(f"game: {name!r} is unknown; {hint}")
    return _GAMES[name]


def load(game: Game) -> Any:
    """The OpenSpiel game object (cached by OpenSpiel's own registry; cheap to call)."""
    return pyspiel.load_game(game.spiel_name)


def decision(game: Game, state: Any, with_prompt: bool = True) -> Decision:
    """What the player to move in the OpenSpiel state `state` sees.

    Args:
        with_prompt: False leaves the prompt empty, for players that do not read it: half of the time goes there.
    """
    seat = state.current_player()
    legal = tuple(state.legal_actions(seat))
    return Decision(
        game=game.name,
        seat=seat,
        infoset=game.infoset(state, seat),
        legal=legal,
        words=tuple(game.action_word(state, seat, action) for action in legal),
        facts=game.render_facts(state, seat),
        prompt=game.render_prompt(state, seat) if with_prompt else "",
    )


def advance_chance(state: Any, rng: np.random.Generator) -> None:
    """Let chance act until a player must, or the game is over."""
    while state.is_chance_node():
        state.apply_action(_drawn(state.chance_outcomes(), rng.random()))


def _drawn(outcomes: list[tuple[int, float]], uniform: float) -> int:
    """The outcome at `uniform` of the cumulative distribution; `Generator.choice` takes ten times as long."""
    for action, probability in outcomes:
        uniform -= probability
        if uniform < 0:
            return action
    return outcomes[-1][0]
