"""Players by a short text, as the command line takes them.

random | first-legal | equilibrium | perfect
mcts:SIMULATIONS[:ROLLOUTS]        mcts:1000
best-response:PLAYER               best-response:equilibrium
WEIGHT*PLAYER,WEIGHT*PLAYER,…      2*random,1*mcts:100     a pool; each game draws one
a folder                           a saved model
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.config import ConfigError
from strat_reasoner.evaluate import estimate_table
from strat_reasoner.games import Game, Player, load
from strat_reasoner.opponents import PolicyTable, RandomPlayer, TablePlayer, equilibrium, uniform_table
from strat_reasoner.opponents_search import FirstLegalPlayer, MctsPlayer, PerfectPlayer, Pool, best_response

KINDS = ("random", "first-legal", "equilibrium", "perfect", "mcts", "best-response")
TABLE_SAMPLES = 512
"""Samples per information state when a best response needs the table of a model."""

LoadModel = Callable[[Path, Game], Player]
"""Loads the model saved in a folder, for a game."""


def make_player(text: str, game: Game, load_model: LoadModel, seed: int = 0) -> Player:
    """The player that `text` names.

    Raises:
        ConfigError: there is none, or it cannot play this game; the text says what would be valid.
    """
    if "*" in text:
        return _pool(text, game, load_model, seed)
    kind, _, rest = text.partition(":")
    if kind == "mcts":
        return _mcts(text, rest, game)
    if kind == "best-response":
        return _best_response(rest, game, load_model, seed)
    if text == "random":
        return RandomPlayer()
    if text == "first-legal":
        return FirstLegalPlayer()
    if text == "perfect":
        return PerfectPlayer(game)
    if text == "equilibrium":
        _need_table(text, game)
        return TablePlayer(equilibrium(game), "equilibrium")
    if Path(text).is_dir():
        return load_model(Path(text), game)
    near = difflib.get_close_matches(kind, KINDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(KINDS)}, or the folder of a model"
    raise ConfigError(f"player: {text!r} is unknown, and no folder of that name exists; {hint}")


def exact_table(player: Player, game: Game) -> PolicyTable | None:
    """The table of a player that has one and of a game small enough; None otherwise."""
    if not game.tabular:
        return None
    if isinstance(player, TablePlayer):
        return player.table
    return uniform_table(game) if isinstance(player, RandomPlayer) else None


def _need_table(text: str, game: Game) -> None:
    if not game.tabular:
        raise ConfigError(f"player: {text!r} needs a game that is small enough for tables; {game.name} is not")


def _mcts(text: str, rest: str, game: Game) -> Player:
    try:
        numbers = [int(number) for number in rest.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(f"player: {text!r} should be mcts:SIMULATIONS or mcts:SIMULATIONS:ROLLOUTS, like mcts:1000")
    return MctsPlayer(game, *numbers)


def _best_response(rest: str, game: Game, load_model: LoadModel, seed: int) -> Player:
    if not rest:
        raise ConfigError("player: best-response needs a player to respond to, like best-response:random")
    _need_table(f"best-response:{rest}", game)
    other = make_player(rest, game, load_model, seed)
    table = exact_table(other, game)
    if table is None:
        table = estimate_table(other, game, TABLE_SAMPLES, np.random.default_rng(seed)).table()
    seats = load(game).num_players()
    response: PolicyTable = {}
    for seat in range(seats):
        response |= best_response(game, [table] * seats, seat)[1]
    # where the response never gets, its table is empty: any legal move will do
    filled = {k: row if row.sum() > 0 else np.eye(len(row))[0] for k, row in response.items()}
    return TablePlayer(filled, f"best-response:{other.name}")


def _pool(text: str, game: Game, load_model: LoadModel, seed: int) -> Player:
    members, weights = [], []
    for part in text.split(","):
        weight, star, name = part.partition("*")
        try:
            weights.append(float(weight))
        except ValueError:
            star = ""
        if not star or not name:
            raise ConfigError(f"player: {part!r} in the pool {text!r} should be WEIGHT*PLAYER, like 2*random")
        members.append(make_player(name.strip(), game, load_model, seed))
    return Pool(members, weights)
