"""Hanabi for two (cooperative, hidden own cards), in two small sizes. Rules: OpenSpiel's `hanabi_learning_env`.

Mini-Hanabi has 2 colours, 2 ranks, hands of 3, 3 information and 3 life tokens; Simple-Hanabi has 3 colours, 2 ranks,
hands of 5, 8 information and 3 life tokens. The score is the number of cards in the fireworks, shared by both.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from strat_reasoner.games.base import Game, observation

_COLOURS = "RYG"
_RANKS = "12"
COPIES = {"1": 3, "2": 1}
"""Cards of each rank in a colour: three of the lowest, one of the highest."""
_NUMBERS = re.compile(r"(Life tokens|Info tokens|Deck size): (\d+)")


class View(NamedTuple):
    """What a player of Hanabi sees."""

    lives: int
    information: int
    deck: int
    fireworks: str
    """`R0Y1`: the highest card played of each colour."""
    own: tuple[str, ...]
    """What each own card can be by the hints so far: `RY1` is a red or yellow 1."""
    partner: tuple[str, ...]
    """Each card of the partner and what it can be by the hints that the partner got: `R1:RY12`."""
    discards: tuple[str, ...]


def view(state: Any, seat: int) -> View:
    """Read OpenSpiel's observation string of the player to move."""
    return _read(state.observation_string(seat))


@functools.lru_cache(maxsize=64)  # facts, prompt and intents of one decision ask in turn
def _read(text: str) -> View:
    numbers = {name: int(number) for name, number in _NUMBERS.findall(text)}
    head, hands = text.split("Hands:\n")
    own, partner = hands.split("-----\n")
    partner, _, last = partner.partition("Deck size")
    return View(
        lives=numbers["Life tokens"],
        information=numbers["Info tokens"],
        deck=numbers["Deck size"],
        fireworks=head.split("Fireworks:")[1].replace(" ", "").strip(),
        own=tuple(line.rpartition("|")[2] for line in own.splitlines()[1:]),
        partner=tuple(f"{line[:2]}:{line.rpartition('|')[2]}" for line in partner.splitlines()),
        discards=tuple(sorted(last.partition("Discards:")[2].split())),
    )


def _subsets(symbols: str) -> Iterable[str]:
    """Every non-empty subset, in the order of `symbols`."""
    for size in range(1, len(symbols) + 1):
        yield from ("".join(chosen) for chosen in itertools.combinations(symbols, size))


@dataclass(frozen=True)
class Hanabi:
    """Texts and words of one size of the game."""

    name: str
    colour_count: int
    hand: int
    information: int
    lives: int
    show_discards: bool
    """Whether `facts` name the discards: they have no room in the larger game. The prompt always does."""

    @property
    def colours(self) -> str:
        """One letter each."""
        return _COLOURS[: self.colour_count]

    @property
    def deck(self) -> int:
        """Cards left when both hands are dealt."""
        return self.colour_count * sum(COPIES.values()) - 2 * self.hand

    def facts(self, state: Any, seat: int) -> str:
        """`3L2I1D R1Y0 R12 RY1 RY12 R1:RY12 Y1:Y1 Y2:RY12 gone:R2`: tokens and deck, fireworks, own hand, partner's."""
        seen = view(state, seat)
        words = [f"{seen.lives}L{seen.information}I{seen.deck}D", seen.fireworks, *seen.own, *seen.partner]
        return " ".join([*words, "gone:" + "".join(seen.discards)] if self.show_discards else words)

    def prompt(self, state: Any, seat: int) -> str:
        """The full text for a language model."""
        seen = view(state, seat)
        own = "; ".join(f"card {i}: {kinds}" for i, kinds in enumerate(seen.own, 1))
        partner = "; ".join(
            f"card {i}: {card} (knows: {kinds})"
            for i, (card, kinds) in enumerate((text.split(":") for text in seen.partner), 1)
        )
        legal = ", ".join(self.moves[action] for action in state.legal_actions(seat))
        return (
            f"You are player {seat} of 2 in a small Hanabi, and win or lose together. Cards have a colour "
            f"({', '.join(self.colours)}) and a rank (1, 2); each colour has three 1s and one 2. Each colour's "
            "firework is built by playing its 1, then its 2; every card so played scores a point. You see your "
            "partner's cards but not your own. In turn play a card (a wrong one costs a life; with no life left the "
            "score is 0), discard one (regains an information token), or spend an information token to hint all cards "
            "of a colour or rank in your partner's hand. After a play or discard you draw. When the deck is empty "
            "each player has one more turn.\n"
            f"Lives: {seen.lives}. Information tokens: {seen.information}. Deck: {seen.deck} cards.\n"
            f"Fireworks: {seen.fireworks}.\nYour hand, by hints so far: {own}.\nPartner's hand: {partner}.\n"
            f"Discards: {' '.join(seen.discards) or 'none'}.\nLegal moves: {legal}."
        )

    @functools.cached_property
    def moves(self) -> tuple[str, ...]:
        """The move's name of every OpenSpiel action id."""
        cards = range(1, self.hand + 1)
        hints = (f"hint-{symbol}" for symbol in (*self.colours, *_RANKS))
        return (*(f"discard-{i}" for i in cards), *(f"play-{i}" for i in cards), *hints)

    def action_word(self, state: Any, seat: int, action: int) -> str:
        """`play-1`, `discard-3`, `hint-R`, `hint-2`."""
        return self.moves[action]

    def intent(self, state: Any, seat: int, action: int) -> str:
        """A play whose card can only fit is safe, else a gamble; hints and discards by their name."""
        kind, _, which = self.moves[action].partition("-")
        if kind != "play":
            return "inform" if kind == "hint" else "regain"
        seen = view(state, seat)
        kinds = seen.own[int(which) - 1]
        fits = [
            colour + rank
            for colour in self.colours
            for rank in _RANKS
            if int(seen.fireworks[seen.fireworks.index(colour) + 1]) + 1 == int(rank)
        ]
        possible = [colour + rank for colour in self.colours for rank in _RANKS if colour in kinds and rank in kinds]
        return "safe" if set(possible) <= set(fits) else "gamble"

    def words(self) -> tuple[str, ...]:
        """All words of facts and moves."""
        counts = itertools.product(
            range(1, self.lives + 1), range(self.information + 1), reversed(range(self.deck + 1))
        )
        kinds = [c + r for c in _subsets(self.colours) for r in _subsets(_RANKS)]
        cards = [c + r for c in self.colours for r in _RANKS]
        levels = itertools.product(range(len(_RANKS) + 1), repeat=self.colour_count)
        words = [f"{lives}L{information}I{deck}D" for lives, information, deck in counts]
        words += ["".join(f"{c}{n}" for c, n in zip(self.colours, row, strict=True)) for row in levels]
        words += kinds
        words += [f"{card}:{known}" for card in cards for known in kinds if card[0] in known and card[1] in known]
        if self.show_discards:
            piles = itertools.product(*(range(COPIES[card[1]] + 1) for card in cards))
            words += ["gone:" + "".join(c * n for c, n in zip(cards, pile, strict=True)) for pile in piles]
        return (*words, *self.moves)

    def game(self) -> Game:
        """The game behind the common interface."""
        parameters = f"players=2,colors={self.colour_count},ranks={len(_RANKS)},hand_size={self.hand}"
        tokens = f"max_information_tokens={self.information},max_life_tokens={self.lives}"
        return Game(
            name=self.name,
            spiel_name=f"hanabi({parameters},{tokens})",
            render_facts=self.facts,
            render_prompt=self.prompt,
            action_word=self.action_word,
            words=self.words(),
            intents=("safe", "gamble", "inform", "regain"),
            intent=self.intent,
            shared_reward=True,
            infoset=observation,
        )


MINI_HANABI = Hanabi("mini-hanabi", colour_count=2, hand=3, information=3, lives=3, show_discards=True).game()
SIMPLE_HANABI = Hanabi("simple-hanabi", colour_count=3, hand=5, information=8, lives=3, show_discards=False).game()
