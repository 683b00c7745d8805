"""The recursive template: what a player writes before its move, and the strict parser that reads it back.

Second-order reasoning after Strat-Reasoner (arXiv 2605.04906): a state summary, then five fields inside `<think>`, then
the move inside `<answer>`, and nothing after it.

    <think> hold Q facing bet . OppIntent: bluff . OppPred: pass . MyIntent: catch . MyAction: bet . MyPred: end
    </think> <answer> bet </answer>

This module holds the word-level form: tokens are words separated by spaces, each field is one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

THINK, END_THINK, ANSWER, END_ANSWER, STOP = "<think>", "</think>", "<answer>", "</answer>", "."
LABELS = ("OppIntent:", "OppPred:", "MyIntent:", "MyAction:", "MyPred:")
NONE, END = "none", "end"
"""`none`: there is no earlier turn to speak of. `end`: the game is expected to be over."""

TEMPLATE_WORDS = (THINK, END_THINK, ANSWER, END_ANSWER, STOP, *LABELS, NONE, END)
_STRUCTURE = frozenset((THINK, END_THINK, ANSWER, END_ANSWER, STOP, *LABELS))


@dataclass(frozen=True)
class Reasoning:
    """The five fields of one turn t, in the order in which they are written."""

    opponent_intent: str
    """The opponent's intent at its turn t-1."""
    opponent_prediction: str
    """What the opponent is thought to have predicted of this player's move at t."""
    my_intent: str
    my_action: str
    my_prediction: str
    """The opponent's move at t+1."""


@dataclass(frozen=True)
class Parsed:
    """What the parser made of an answer. `reasoning` and `answer` are None where the text does not hold them."""

    well_formed: bool
    reasoning: Reasoning | None
    answer: str | None


def write(summary: Sequence[str], reasoning: Reasoning, answer: str) -> list[str]:
    """The words of a complete answer."""
    words = [THINK, *summary, STOP]
    for label, value in zip(LABELS, astuple(reasoning), strict=True):
        words += [label, value, STOP]
    return [*words[:-1], END_THINK, ANSWER, answer, END_ANSWER]


def parse(words: Sequence[str]) -> Parsed:
    """Read the words of an answer (without the end-of-text token).

    Well formed means: exactly the shape that `write` makes, with one plain word in each field and in the answer. An
    answer that breaks the shape may still yield its fields, so that statistics can tell what was wrong.
    """
    words = list(words)
    summary_end = words.index(STOP) if STOP in words else -1
    body = words[summary_end + 1 :]
    shape_holds = (
        summary_end > 1
        and words[0] == THINK
        and not _STRUCTURE.intersection(words[1:summary_end])
        and len(body) == 3 * len(LABELS) + 3
    )
    values = _fields(body)
    reasoning = Reasoning(*values) if values else None
    tail = body[-4:]
    answered = (
        len(tail) == 4 and tail[:2] == [END_THINK, ANSWER] and tail[3] == END_ANSWER and tail[2] not in _STRUCTURE
    )
    return Parsed(shape_holds and reasoning is not None and answered, reasoning, tail[2] if answered else None)


def _fields(body: Sequence[str]) -> list[str] | None:
    """The five field values of `OppIntent: x . OppPred: y . … MyPred: z </think>`, or None."""
    values = []
    for index, label in enumerate(LABELS):
        piece = body[3 * index : 3 * index + 3]
        closing = END_THINK if index == len(LABELS) - 1 else STOP
        if len(piece) < 3 or piece[0] != label or piece[1] in _STRUCTURE or piece[2] != closing:
            return None
        values.append(piece[1])
    return values
