"""Liar's Dice with one four-sided die a player. Rules: OpenSpiel's `liars_dice`, bidding rule `reset-face`."""

from __future__ import annotations

from typing import Any

from strat_reasoner.games.base import Game

SIDES, DICE = 4, 2
LIAR = SIDES * DICE
"""The action id after all bids."""
BIDS = tuple(f"{quantity}-{face}" for quantity in range(1, DICE + 1) for face in range(1, SIDES + 1))
_RULES = (
    f"Each player rolls one die with {SIDES} sides and sees only its own. Players in turn bid quantity-face, for "
    f"example 2-3: at least two of all dice show 3. The face {SIDES} is wild and counts as any face. A bid must raise "
    "the quantity, or keep it and raise the face. Instead of bidding a player may say liar: then the dice are shown, "
    "and the last bidder wins if the bid was true, else the one who said liar."
)


def _die_and_bids(state: Any, seat: int) -> tuple[str, list[str]]:
    """OpenSpiel's information-state string: the own die, then the bids."""
    die, *bids = state.information_state_string(seat).split()
    return die, bids


def facts(state: Any, seat: int) -> str:
    """`die 3 bids 1-2 2-1`."""
    die, bids = _die_and_bids(state, seat)
    return " ".join(["die", die, "bids", *bids])


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    die, bids = _die_and_bids(state, seat)
    history = ", ".join(f"player {turn % 2}: {bid}" for turn, bid in enumerate(bids))
    legal = ", ".join(action_word(state, seat, action) for action in state.legal_actions(seat))
    return (
        f"You are player {seat} of 2 in Liar's Dice. {_RULES}\nYour die: {die}.\n"
        f"Bids so far: {history or 'none'}.\nLegal moves: {legal}."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """`2-3` for a bid, or `liar`."""
    return "liar" if action == LIAR else BIDS[action]


def intent(state: Any, seat: int, action: int) -> str:
    """Whether the own die supports the bid: honest or bluff; doubt for calling a liar."""
    if action == LIAR:
        return "doubt"
    die, _ = _die_and_bids(state, seat)
    face = BIDS[action].split("-")[1]
    return "honest" if die in (face, str(SIDES)) else "bluff"


LIARS_DICE = Game(
    name="liars-dice",
    spiel_name=f"liars_dice(players=2,numdice=1,dice_sides={SIDES})",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=("die", *map(str, range(1, SIDES + 1)), "bids", *BIDS, "liar"),
    intents=("honest", "bluff", "doubt"),
    intent=intent,
    tabular=True,
)
