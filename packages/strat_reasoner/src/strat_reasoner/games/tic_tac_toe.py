"""Tic-tac-toe: three in a row on nine squares. Rules: OpenSpiel's `tic_tac_toe`; squares are called 1 to 9 here."""

from __future__ import annotations

from typing import Any

from strat_reasoner.games.base import Game

MARKS = "xo"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_CORNERS = (0, 2, 6, 8)
_RULES = (
    "Players in turn put their mark on an empty square of a 3 by 3 board; x moves first. Three marks in a row, column "
    "or diagonal win; a full board is a draw. Squares are numbered 1 to 9, row by row."
)


def board(state: Any, seat: int) -> str:
    """The nine squares row by row: x, o or `.`."""
    return str(state.observation_string(seat)).replace("\n", "")


def facts(state: Any, seat: int) -> str:
    """The nine squares, `_` for an empty one: `x _ o _ _ _ _ _ _`."""
    return " ".join(board(state, seat).replace(".", "_"))


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    squares = [str(i + 1) if mark == "." else mark for i, mark in enumerate(board(state, seat))]
    rows = "\n".join(" ".join(squares[row : row + 3]) for row in (0, 3, 6))
    moves = [
        f"{MARKS[turn % 2]} {int(action) + 1}"
        for turn, action in enumerate(filter(None, state.history_str().replace(" ", "").split(",")))
    ]
    legal = ", ".join(square for square in squares if square not in MARKS)
    return (
        f"You are player {seat} of 2 in tic-tac-toe and play {MARKS[seat]}. {_RULES}\n"
        f"Board (empty squares show their number):\n{rows}\n"
        f"Moves so far: {', '.join(moves) or 'none'}.\nLegal moves: {legal}."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """The square's number, 1 to 9."""
    return str(action + 1)


def completes(squares: str, mark: str, action: int) -> bool:
    """Whether `mark` on square `action` makes three in a row."""
    return any(action in line and all(i == action or squares[i] == mark for i in line) for line in LINES)


def intent(state: Any, seat: int, action: int) -> str:
    """Win, block the other's win, or what kind of square it is."""
    squares = board(state, seat)
    if completes(squares, MARKS[seat], action):
        return "win"
    if completes(squares, MARKS[1 - seat], action):
        return "block"
    if action == 4:
        return "centre"
    return "corner" if action in _CORNERS else "edge"


TIC_TAC_TOE = Game(
    name="tic-tac-toe",
    spiel_name="tic_tac_toe",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=("x", "o", "_", *map(str, range(1, 10))),
    intents=("win", "block", "centre", "corner", "edge"),
    intent=intent,
)
