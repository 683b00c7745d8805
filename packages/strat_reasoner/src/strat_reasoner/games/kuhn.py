"""Kuhn poker (Kuhn 1950): one card each, one bet; the smallest game with bluffing. Rules: OpenSpiel's `kuhn_poker`.

For two players with three cards, and for three players with four.
"""

from __future__ import annotations

from typing import Any

from strat_reasoner.games.base import Game

CARDS = ("J", "Q", "K", "A")
PASS, BET = 0, 1
_MOVES = {PASS: "pass", BET: "bet"}
_SITUATIONS = {"": "first", "p": "after pass", "b": "facing bet", "pb": "passed facing bet"}


def _card_and_history(state: Any, seat: int) -> tuple[str, str]:
    """OpenSpiel's information-state string is the card's number followed by the moves (p, b)."""
    text = state.information_state_string(seat)
    return CARDS[int(text[0])], text[1:]


def facts(state: Any, seat: int) -> str:
    """`hold Q facing bet`."""
    card, history = _card_and_history(state, seat)
    return f"hold {card} {_SITUATIONS[history]}"


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    card, history = _card_and_history(state, seat)
    moves = ", ".join(f"player {turn % 2}: {'pass' if move == 'p' else 'bet'}" for turn, move in enumerate(history))
    return (
        f"You are player {seat} of 2 in Kuhn poker. The deck has three cards, J < Q < K; each player antes 1 chip and "
        "gets one card. Players in turn pass or bet 1 chip. After a bet the other may bet (call) or pass (fold). "
        "If both pass or a bet is called, the higher card takes the pot.\n"
        f"Your card: {card}.\nMoves so far: {moves or 'none'}.\nLegal moves: pass, bet."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """`pass` or `bet`."""
    return _MOVES[action]


def intent(state: Any, seat: int, action: int) -> str:
    """What a move usually means, from the card and whether a bet is on the table."""
    card, history = _card_and_history(state, seat)
    if history.endswith("b"):
        return "fold" if action == PASS else ("value" if card == "K" else "catch")
    if action == BET:
        return "bluff" if card == "J" else "value"
    return "trap" if card == "K" else "wait"


KUHN = Game(
    name="kuhn",
    spiel_name="kuhn_poker",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=("hold", *CARDS[:3], "first", "after", "facing", "passed", "pass", "bet"),
    intents=("value", "bluff", "trap", "wait", "catch", "fold"),
    intent=intent,
    tabular=True,
)


def facts3(state: Any, seat: int) -> str:
    """`hold A moves pass bet`."""
    card, history = _card_and_history(state, seat)
    return " ".join(["hold", card, "moves", *("pass" if move == "p" else "bet" for move in history)])


def prompt3(state: Any, seat: int) -> str:
    """The full text for a language model, three players."""
    card, history = _card_and_history(state, seat)
    moves = ", ".join(f"player {turn % 3}: {'pass' if move == 'p' else 'bet'}" for turn, move in enumerate(history))
    return (
        f"You are player {seat} of 3 in Kuhn poker. The deck has four cards, J < Q < K < A; each player antes 1 chip "
        "and gets one card. Players in turn pass or bet 1 chip. After a bet each of the others may bet (call) or pass "
        "(fold), once. The highest card among those who paid the most takes the pot.\n"
        f"Your card: {card}.\nMoves so far: {moves or 'none'}.\nLegal moves: pass, bet."
    )


def intent3(state: Any, seat: int, action: int) -> str:
    """As `intent`; the ace is the card that always wins, J and Q are weak."""
    card, history = _card_and_history(state, seat)
    if "b" in history:
        return "fold" if action == PASS else ("value" if card == "A" else "catch")
    if action == BET:
        return "bluff" if card in "JQ" else "value"
    return "trap" if card == "A" else "wait"


KUHN3 = Game(
    name="kuhn3",
    spiel_name="kuhn_poker(players=3)",
    render_facts=facts3,
    render_prompt=prompt3,
    action_word=action_word,
    words=("hold", *CARDS, "moves", "pass", "bet"),
    intents=("value", "bluff", "trap", "wait", "catch", "fold"),
    intent=intent3,
    tabular=True,
)
