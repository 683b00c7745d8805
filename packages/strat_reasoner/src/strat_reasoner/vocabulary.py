"""A closed word-level vocabulary for models that are made here: one token per word of template and games."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strat_reasoner.games import Decision, get_game
from strat_reasoner.reasoning import TEMPLATE_WORDS

PAD, BOS, EOS, GO = "<pad>", "<bos>", "<eos>", ":"
SEATS = ("seat0", "seat1", "seat2")
MAX_PROMPT_EXTRA = 4
"""Tokens of a prompt beside the facts: BOS, game, seat, GO."""


class Vocabulary:
    """Words to ids and back. The order of the words is part of a checkpoint."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self.ids = {word: index for index, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise ValueError("a vocabulary must not name a word twice")
        self.pad, self.bos, self.eos = self.ids[PAD], self.ids[BOS], self.ids[EOS]

    @classmethod
    def for_games(cls, games: Iterable[str]) -> Vocabulary:
        """The vocabulary of the template and of these games, in a fixed order."""
        words = [PAD, BOS, EOS, GO, *SEATS, *TEMPLATE_WORDS]
        for name in games:
            game = get_game(name)
            words += [name, *game.words, *game.intents]
        return cls(list(dict.fromkeys(words)))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Ids of words; KeyError for a word that is not in the vocabulary."""
        return [self.ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of ids, up to the first end-of-text token."""
        words = []
        for index in ids:
            if index == self.eos:
                break
            words.append(self.words[index])
        return words

    def prompt(self, decision: Decision) -> list[int]:
        """What the model is given: `<bos> kuhn seat0 hold Q facing bet :`."""
        return self.encode([BOS, decision.game, SEATS[decision.seat], *decision.facts.split(), GO])
