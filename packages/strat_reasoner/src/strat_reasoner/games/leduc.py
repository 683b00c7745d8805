"""Leduc hold'em (Southey et al. 2005): six cards, two rounds, one public card. Rules: OpenSpiel's `leduc_poker`.

Suits decide nothing in Leduc, so OpenSpiel's `suit_isomorphism` merges them: the same game with the same value, and a
third of the information states.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from strat_reasoner.games.base import Game

CARDS = ("J", "Q", "K")
FOLD, CALL, RAISE = 0, 1, 2
MOVES = ("fold", "call", "raise")
_FIELD = re.compile(r"\[(\w+): ([^]]*)\]")
_RULES = (
    "The deck has two jacks, two queens and two kings, J < Q < K. Each player antes 1 chip and gets one card. In each "
    "of two rounds players in turn fold, call (or check) or raise, at most two raises a round; a raise costs 2 chips "
    "more than the call in round 1 and 4 in round 2. Before round 2 one public card is shown. At the end a player "
    "whose card pairs the public card wins, else the higher card; equal cards split the pot."
)


class View(NamedTuple):
    """What a player of Leduc sees."""

    card: str
    public: str
    """Empty in round 1."""
    round1: tuple[int, ...]
    round2: tuple[int, ...]
    pot: int


def view(state: Any, seat: int) -> View:
    """Read OpenSpiel's information-state string."""
    fields = dict(_FIELD.findall(state.information_state_string(seat)))
    moves = [tuple(map(int, fields[name].split())) for name in ("Round1", "Round2")]
    public = CARDS[int(fields["Public"])] if "Public" in fields else ""
    return View(CARDS[int(fields["Private"])], public, moves[0], moves[1], int(fields["Pot"]))


def _sequence(moves: tuple[int, ...]) -> str:
    """`cr` for call, raise; `-` for no move yet."""
    return "".join("fcr"[move] for move in moves) or "-"


def facts(state: Any, seat: int) -> str:
    """`hold Q first cr` in round 1; `hold Q first crc shown K then r` in round 2 (c call, r raise)."""
    seen = view(state, seat)
    text = f"hold {seen.card} first {_sequence(seen.round1)}"
    return f"{text} shown {seen.public} then {_sequence(seen.round2)}" if seen.public else text


def _told(moves: tuple[int, ...]) -> str:
    return ", ".join(f"player {turn % 2}: {MOVES[move]}" for turn, move in enumerate(moves)) or "none"


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    seen = view(state, seat)
    second = f"Public card: {seen.public}.\nMoves of round 2: {_told(seen.round2)}.\n" if seen.public else ""
    legal = ", ".join(MOVES[action] for action in state.legal_actions(seat))
    return (
        f"You are player {seat} of 2 in Leduc poker. {_RULES}\nYour card: {seen.card}.\n"
        f"Moves of round 1: {_told(seen.round1)}.\n{second}Pot: {seen.pot} chips.\nLegal moves: {legal}."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """`fold`, `call` or `raise`."""
    return MOVES[action]


def intent(state: Any, seat: int, action: int) -> str:
    """What a move usually means, from the strength of the hand."""
    seen = view(state, seat)
    strong = seen.card == seen.public or (not seen.public and seen.card == "K")
    if action == FOLD:
        return "give-up"
    if action == RAISE:
        return "value" if strong else "bluff"
    facing = RAISE in (seen.round2 if seen.public else seen.round1)[-1:]
    if facing:
        return "catch"
    return "trap" if strong else "wait"


def _sequences() -> list[str]:
    """All betting sequences of one round that leave the game open."""
    return ["-", "c", "r", "cr", "rr", "crr", "cc", "rc", "crc", "rrc", "crrc"]


LEDUC = Game(
    name="leduc",
    spiel_name="leduc_poker(suit_isomorphism=True)",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=("hold", *CARDS, "first", "shown", "then", *_sequences(), *MOVES),
    intents=("value", "bluff", "trap", "wait", "catch", "give-up"),
    intent=intent,
    tabular=True,
)
