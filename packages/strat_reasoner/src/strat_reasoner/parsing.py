"""Reading the free-text answer of a language model: a strict format, a verdict that says why, and linear time.

    <think> … </think> <answer>move</answer>

The block comes first, the answer last, and each tag stands exactly once. Whatever a model writes inside `<think>` is
its own affair; instructions there, or tags of another seat or of a chat template, have no effect on the verdict beyond
the rules below. The word-level form of the same template is read by `strat_reasoner.reasoning`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strat_reasoner.games import Decision, Move

MAX_ANSWER_CHARS = 20_000
"""An answer longer than this is over-long and is not read at all."""
MAX_MOVE_CHARS = 64
_TAG = re.compile(r"<\s*/?\s*(?:think|answer)\b[^<>]{0,64}>", re.IGNORECASE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Verdict:
    """What an answer amounts to."""

    action: int | None
    """OpenSpiel action id; None unless the answer is well formed and names a legal move."""
    well_formed: bool
    reasoning: str
    """The text inside `<think>`, empty if the answer is malformed."""
    problem: str = ""
    """Why there is no action, in words for statistics and for a person: empty, `format: …` or `illegal: …`."""


def parse_text(text: str, seen: Decision) -> Verdict:
    """Read an answer to the decision `seen`.

    Moves are compared with the legal moves' names without regard to case and surrounding white space. Only ASCII
    letters are folded: a look-alike from another script is another word.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return _malformed(f"longer than {MAX_ANSWER_CHARS} characters")
    found = [(match.start(), match.end(), match.group()) for match in _TAG.finditer(text)]
    if tuple(tag for _, _, tag in found) != _TAGS:
        return _malformed("the tags <think> </think> <answer> </answer> must stand once each, in this order")
    (think, think_end, _), (close, close_end, _), (answer, answer_end, _), (end, end_end, _) = found
    outside = text[:think], text[close_end:answer], text[end_end:]
    if any(part.strip(" \t\r\n") for part in outside):
        return _malformed("text outside <think> and <answer>")
    word = text[answer_end:end].strip(" \t\r\n")
    reasoning = text[think_end:close].strip()
    if not word or len(word) > MAX_MOVE_CHARS or "\n" in word:
        return _malformed("no single move inside <answer>")
    index = _index_of(word, seen.words)
    if index is None:
        return Verdict(None, True, reasoning, f"illegal: {ascii(word)[1:-1]} is no legal move")
    return Verdict(seen.legal[index], True, reasoning)


def move_of(text: str, seen: Decision) -> Move:
    """The answer as a `Move`."""
    verdict = parse_text(text, seen)
    return Move(verdict.action, text, verdict.well_formed)


def parse_move(word: str, seen: Decision) -> int | None:
    """The action id of a move's bare name, as a person types it; None if it is no legal move."""
    index = _index_of(word.strip(" \t\r\n"), seen.words) if len(word) <= MAX_MOVE_CHARS else None
    return None if index is None else seen.legal[index]


def _index_of(word: str, words: Sequence[str]) -> int | None:
    """Place of `word` among the names, ASCII case aside."""
    if not word.isascii():
        return None
    lower = [name.lower() for name in words]
    return lower.index(word.lower()) if word.lower() in lower else None


def _malformed(why: str) -> Verdict:
    return Verdict(None, False, "", f"format: {why}")
