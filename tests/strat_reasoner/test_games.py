"""Every game behind the one interface: words, facts, prompts, and the rules that OpenSpiel plays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from common.config import ConfigError
from strat_reasoner import games
from strat_reasoner.games import Game, decision, get_game, load
from strat_reasoner.games.connect_four import completes
from strat_reasoner.opponents import decision_states
from strat_reasoner.rollout import MAX_FACTS
from strat_reasoner.vocabulary import Vocabulary


def play_randomly(game: Game, count: int, seed: int) -> list[Any]:
    """The decision states of some random games."""
    rng = np.random.default_rng(seed)
    states = []
    for _ in range(count):
        state = load(game).new_initial_state()
        while not state.is_terminal():
            if state.is_chance_node():
                actions, probabilities = zip(*state.chance_outcomes(), strict=True)
                state.apply_action(int(rng.choice(actions, p=probabilities)))
            else:
                states.append(state.clone())
                state.apply_action(int(rng.choice(state.legal_actions())))
    return states


def after(name: str, *actions: int) -> Any:
    """The state after these OpenSpiel actions, chance included."""
    state = load(get_game(name)).new_initial_state()
    for action in actions:
        state.apply_action(action)
    return state


@pytest.mark.parametrize("name", games.names())
def test_texts_of_a_game_keep_to_its_words_and_name_every_legal_move(name: str) -> None:
    game = get_game(name)
    vocabulary = Vocabulary.for_games([name])
    for state in play_randomly(game, 40, seed=1):
        seen = decision(game, state)
        assert seen.seat == state.current_player()
        assert len(set(seen.words)) == len(seen.legal) > 0
        assert len(seen.facts.split()) <= MAX_FACTS
        assert vocabulary.prompt(seen)
        assert vocabulary.encode(seen.words)
        assert set(seen.words) <= set(game.words)
        assert {game.intent(state, seen.seat, action) for action in seen.legal} <= set(game.intents)
        assert f"player {seen.seat} of " in seen.prompt
        if name != "negotiation":  # up to 120 moves: the prompt describes them
            assert seen.prompt.endswith(f"Legal moves: {', '.join(seen.words)}.")


@pytest.mark.parametrize("name", ["kuhn", "kuhn3", "leduc", "liars-dice"])
def test_each_information_state_of_a_small_game_has_its_own_facts_and_prompt(name: str) -> None:
    game = get_game(name)
    states = decision_states(game)
    decisions = [decision(game, state) for state in states.values()]
    expected = {"kuhn": 12, "kuhn3": 48, "leduc": 288, "liars-dice": 1024}
    assert game.tabular
    assert len(decisions) == expected[name]
    assert len({(d.seat, d.facts) for d in decisions}) == len(decisions)
    assert len({d.prompt for d in decisions}) == len(decisions)


def test_facts_of_known_positions() -> None:
    def facts(name: str, *actions: int) -> str:
        return decision(get_game(name), after(name, *actions)).facts

    assert facts("kuhn3", 3, 0, 1, 0, 1) == "hold Q moves pass bet"
    assert facts("leduc", 1, 2, 1, 2) == "hold Q first cr"  # queen and king dealt; call, raise
    assert facts("leduc", 1, 2, 2, 2, 1, 0, 2) == "hold K first rrc shown J then r"
    assert facts("liars-dice", 2, 3, 1, 4) == "die 3 bids 1-2 2-1"
    assert facts("tic-tac-toe", 4, 0) == "o _ _ _ x _ _ _ _"
    assert facts("connect-four", 0, 0, 6) == "xo _ _ _ _ _ x"
    dealt = (0, 1, 2, 0, 2, 3)  # player 0 holds R1 R2 Y1, player 1 R1 Y1 Y2
    assert facts("mini-hanabi", *dealt) == "3L3I2D R0Y0 RY12 RY12 RY12 R1:RY12 Y1:RY12 Y2:RY12 gone:"
    hint = get_game("mini-hanabi").words.index("hint-Y") - get_game("mini-hanabi").words.index("discard-1")
    assert facts("mini-hanabi", *dealt, hint) == "3L2I2D R0Y0 R12 Y12 Y12 R1:RY12 R2:RY12 Y1:RY12 gone:"


def test_the_negotiator_keeps_what_it_offers() -> None:
    """The pool of instance 0 is 1, 2, 3; player 0 values 8, 1, 0 and keeps 1-1-0; player 1 values 4, 0, 2."""
    game = get_game("negotiation")
    state = after("negotiation", 0)
    seen = decision(game, state)
    assert seen.facts == "pool 1 2 3 values 8 1 0 turn 1 offered none"
    state.apply_action(seen.legal[seen.words.index("1-1-0")])
    seen = decision(game, state)
    assert seen.facts == "pool 1 2 3 values 4 0 2 turn 2 offered 1-1-0"
    state.apply_action(seen.legal[seen.words.index("agree")])
    assert state.returns() == [9.0, 6.0]


@pytest.mark.parametrize("name", ["mini-hanabi", "simple-hanabi", "negotiation", "leduc", "liars-dice"])
def test_move_names_mean_what_openspiel_plays(name: str) -> None:
    game = get_game(name)
    for state in play_randomly(game, 10, seed=2):
        for action in state.legal_actions():
            ours, theirs = game.action_word(state, state.current_player(), action), state.action_to_string(action)
            if "hanabi" in name:
                kind, which = ours.split("-")
                numbered = f"{kind.capitalize()} {int(which) - 1}" if kind != "hint" else f" {which})"
                assert numbered in theirs
            elif name == "negotiation" and ours != "agree":
                assert ours == "-".join(re.findall(r"\d+", theirs))
            else:
                assert ours == theirs.lower()


def test_hanabi_facts_show_what_a_player_may_see_and_no_more() -> None:
    game = get_game("mini-hanabi")
    for state in play_randomly(game, 30, seed=3):
        words = decision(game, state).facts.split()
        text = state.observation_string(state.current_player())
        hands = text.split("Hands:\n")[1]
        own, partner = hands.split("-----\n")
        assert re.findall(r"\|(\w+)\n", own + "\n") == [w for w in words[2:] if ":" not in w]
        assert re.findall(r"^([RY][12]) \|\|", partner, re.M) == [w[:2] for w in words[2:-1] if ":" in w]
        assert decision(game, state).infoset == text


def test_intents_know_wins_and_blocks() -> None:
    game = get_game("tic-tac-toe")
    state = after("tic-tac-toe", 0, 3, 1, 4)  # x on 1 and 2, o on 4 and 5; x to move
    assert game.intent(state, 0, 2) == "win"
    assert game.intent(state, 0, 5) == "block"
    assert game.intent(state, 0, 8) == "corner"
    four = get_game("connect-four")
    state = after("connect-four", 3, 0, 3, 0, 3, 1)  # x has three in column 4
    assert four.intent(state, 0, 3) == "win"
    assert four.intent(state, 0, 6) == "side"
    assert completes(["x", "ox", "oox", "ooo", "", "", ""], "x", 3)  # the rising diagonal
    assert completes(["ooo", "oox", "ox", "", "", "", ""], "x", 3) is False
    assert completes(["ooox", "oox", "ox", "", "", "", ""], "x", 3)  # the falling one


def test_an_unknown_game_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'tictactoe' is unknown; did you mean 'tic-tac-toe'"):
        get_game("tictactoe")
