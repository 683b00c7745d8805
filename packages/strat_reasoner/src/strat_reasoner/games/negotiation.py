"""A simple negotiation over three kinds of items (Lewis et al. 2017). Rules: OpenSpiel's `bargaining`, six turns.

Both players know the pool of items and their own values, not the other's. They offer splits in turn until one agrees;
without an agreement both get nothing. The returns need not sum to zero.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from strat_reasoner.games.base import Game

TURNS = 6
MAX_ITEMS, MAX_VALUE = 7, 10
NONE = "none"
_COUNT = re.compile(r": (\d+)")


class View(NamedTuple):
    """What a negotiator sees; items in the order books, hats, balls."""

    pool: tuple[int, ...]
    values: tuple[int, ...]
    offers: tuple[tuple[int, ...], ...]
    """What each proposer so far wanted to keep, oldest first."""


def view(state: Any, seat: int) -> View:
    """Read OpenSpiel's information-state string."""
    return _read(state.information_state_string(seat))


@functools.lru_cache(maxsize=64)  # facts, prompt and intents of one decision ask in turn
def _read(text: str) -> View:
    pool, values, _, *offers = text.strip().splitlines()
    numbers = [tuple(map(int, _COUNT.findall(line))) for line in (pool, values, *offers)]
    return View(numbers[0], numbers[1], tuple(numbers[2:]))


def facts(state: Any, seat: int) -> str:
    """`pool 4 1 1 values 1 6 0 turn 2 offered 3-1-0`: the last offer is what the other wants to keep."""
    seen = view(state, seat)
    last = "-".join(map(str, seen.offers[-1])) if seen.offers else NONE
    turn = len(seen.offers) + 1
    return " ".join(
        ["pool", *map(str, seen.pool), "values", *map(str, seen.values), "turn", str(turn), "offered", last]
    )


def _items(counts: tuple[int, ...]) -> str:
    return ", ".join(f"{count} {name}" for count, name in zip(counts, ("books", "hats", "balls"), strict=True))


def prompt(state: Any, seat: int) -> str:
    """The full text for a language model."""
    seen = view(state, seat)
    history = "; ".join(f"player {turn % 2} wants to keep {_items(offer)}" for turn, offer in enumerate(seen.offers))
    agree = " or agree" if seen.offers else ""
    pool = " x ".join(f"0..{count}" for count in seen.pool)
    return (
        f"You are player {seat} of 2 in a negotiation. Items are split between you. Players in turn offer a split, "
        f"saying what they keep themselves, or agree to the other's last offer. After {TURNS} turns without agreement "
        "both get nothing. You know your own values only; you get the value of the items that you keep.\n"
        f"Pool: {_items(seen.pool)}.\nYour values of one each: {_items(seen.values)}.\n"
        f"Offers so far: {history or 'none'}.\n"
        f"Legal moves: books-hats-balls that you keep ({pool}), for example {'-'.join(map(str, seen.pool))}{agree}."
    )


def action_word(state: Any, seat: int, action: int) -> str:
    """`2-0-1`: the books, hats and balls that the mover keeps; or `agree`."""
    if action == AGREE:
        return "agree"
    return OFFERS[action]


def intent(state: Any, seat: int, action: int) -> str:
    """Agree, or how much of the own value the offer keeps: greedy (all), fair (at least half), or generous."""
    if action == AGREE:
        return "accept"
    seen = view(state, seat)
    kept = map(int, OFFERS[action].split("-"))
    share = sum(count * value for count, value in zip(kept, seen.values, strict=True)) / MAX_VALUE
    if share >= 1:
        return "greedy"
    return "fair" if share >= 0.5 else "generous"


def _offers() -> tuple[str, ...]:
    """All splits of up to seven items in OpenSpiel's order of action ids: the first item varies slowest."""
    counts = range(MAX_ITEMS + 1)
    return tuple(f"{b}-{h}-{s}" for s in counts for h in counts for b in counts if b + h + s <= MAX_ITEMS)


OFFERS = _offers()
AGREE = len(OFFERS)

NEGOTIATION = Game(
    name="negotiation",
    spiel_name=f"bargaining(max_turns={TURNS})",
    render_facts=facts,
    render_prompt=prompt,
    action_word=action_word,
    words=("pool", "values", "turn", "offered", *map(str, range(MAX_VALUE + 1)), NONE, *OFFERS, "agree"),
    intents=("accept", "greedy", "fair", "generous"),
    intent=intent,
)
