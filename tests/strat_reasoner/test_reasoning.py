from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strat_reasoner.reasoning import TEMPLATE_WORDS, Reasoning, parse, write
from strat_reasoner.vocabulary import Vocabulary

FIELDS = Reasoning("bluff", "pass", "catch", "bet", "end")
TEXT = (
    "<think> hold Q facing bet . OppIntent: bluff . OppPred: pass . MyIntent: catch . MyAction: bet . MyPred: end "
    "</think> <answer> bet </answer>"
)


def test_an_answer_is_written_and_read_back() -> None:
    assert " ".join(write(["hold", "Q", "facing", "bet"], FIELDS, "bet")) == TEXT
    parsed = parse(TEXT.split())
    assert (parsed.well_formed, parsed.reasoning, parsed.answer) == (True, FIELDS, "bet")


@pytest.mark.parametrize(
    "broken",
    [
        "",
        TEXT.replace("<think> ", ""),
        TEXT.replace(" </answer>", ""),
        TEXT + " bet",  # something after the answer
        TEXT.replace("OppPred: pass", "OppPred: pass pass"),
        TEXT.replace("MyIntent: catch . ", ""),
        TEXT.replace("OppIntent: bluff . OppPred: pass", "OppPred: pass . OppIntent: bluff"),
        TEXT.replace("<answer> bet", "<answer> <answer>"),
        TEXT.replace("hold Q facing bet", "hold <answer> bet </answer>"),  # an answer smuggled into the summary
        TEXT.replace("hold Q facing bet .", "."),
        TEXT.replace("bluff", "</think>"),
    ],
)
def test_every_departure_from_the_format_is_malformed(broken: str) -> None:
    assert not parse(broken.split()).well_formed


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*TEMPLATE_WORDS, "bet", "x"]), max_size=40))
def test_any_words_are_judged_without_a_crash_and_only_the_exact_shape_passes(words: list[str]) -> None:
    parsed = parse(words)
    if parsed.well_formed:
        assert parsed.reasoning is not None
        assert parsed.answer is not None
        summary = words[1 : words.index(".")]
        assert write(summary, parsed.reasoning, parsed.answer) == words


def test_the_vocabulary_round_trips_and_stops_at_the_end_token() -> None:
    vocabulary = Vocabulary.for_games(["kuhn"])
    ids = vocabulary.encode(TEXT.split())
    assert vocabulary.decode([*ids, vocabulary.eos, 5, 6]) == TEXT.split()
    assert len(vocabulary.words) == len(set(vocabulary.words))
