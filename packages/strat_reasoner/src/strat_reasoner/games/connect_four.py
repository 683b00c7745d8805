"""Connect Four on 7 columns and 6 rows. Rules: OpenSpiel's `connect_four`; columns are called 1 to 7 here."""

from __future__ import annotations

import itertools
from typing import Any

from strat_reasoner.games.base import Game

MARKS = "xo"
COLUMNS, ROWS = 7, 6
EMPTY = "_"
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_RULES = (
    "Players in turn drop a disc into one of 7 columns, where it falls to the lowest empty of 6 rows; x moves first. "
    "Four discs in a row, column or diagonal win; a full board is a draw. Columns are numbered 1 to 7 from the left."
)


def columns(state: Any, seat: int) -> list[str]:
    """The discs of each column from the bottom up: `["", "xo", …]`."""
    rows = str(state.observation_string(seat)).split()
    return ["".join(row[c] for row in reversed(rows)).rstrip(".") for c in range(COLUMNS)]


def facts(state: Any, seat: int) -> str:
    """One word per column, bottom up, `_` for an empty one: `_ x xo _ _ _ _`."""
    return " ".join(column or EMPTY for column in columns(state, seat))


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    rows = str(state.observation_string(seat)).strip()
    history = [f"{MARKS[turn % 2]} {action + 1}" for turn, action in enumerate(state.history())]
    legal = ", ".join(str(action + 1) for action in state.legal_actions(seat))
    return (
        f"You are player {seat} of 2 in Connect Four and play {MARKS[seat]}. {_RULES}\n"
        f"Board (top row first):\n1234567\n{rows}\n"
        f"Moves so far: {', '.join(history) or 'none'}.\nLegal moves: {legal}."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """The column's number, 1 to 7."""
    return str(action + 1)


def completes(discs: list[str], mark: str, column: int) -> bool:
    """Whether a disc of `mark` dropped into `column` makes four in a row."""
    row = len(discs[column])

    def run(step_row: int, step_column: int) -> int:
        length, r, c = 0, row + step_row, column + step_column
        while 0 <= c < COLUMNS and 0 <= r < len(discs[c]) and discs[c][r] == mark:
            length, r, c = length + 1, r + step_row, c + step_column
        return length

    return any(1 + run(dr, dc) + run(-dr, -dc) >= 4 for dr, dc in _DIRECTIONS)


def intent(state: Any, seat: int, action: int) -> str:
    """Win, block the other's win, or towards the centre or the side."""
    discs = columns(state, seat)
    if completes(discs, MARKS[seat], action):
        return "win"
    if completes(discs, MARKS[1 - seat], action):
        return "block"
    return "centre" if 2 <= action <= 4 else "side"


CONNECT_FOUR = Game(
    name="connect-four",
    spiel_name="connect_four",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=(
        EMPTY,
        *("".join(discs) for height in range(1, ROWS + 1) for discs in itertools.product(MARKS, repeat=height)),
        *map(str, range(1, COLUMNS + 1)),
    ),
    intents=("win", "block", "centre", "side"),
    intent=intent,
)
