"""Traces of imperfect play in the recursive format: what the base model learns to write before it is trained by RL.

A teacher plays itself: a little of the equilibrium, mostly chance. What it writes is meaningful in a simple way: its
statements about the other player are what that player really wrote or did with probability `truth_share` (within a
played game the truth is a sample of the posterior, so no hidden card leaks to the model), and its action is the one
that its stated intent names with probability `intent_strength`. So the text is causal for the action, and imperfectly
true.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strat_reasoner.config import TrainConfig
from strat_reasoner.games import Decision, decision, get_game, load
from strat_reasoner.opponents import equilibrium, mix, uniform_table
from strat_reasoner.policy import pad_prompts
from strat_reasoner.reasoning import END, NONE, Reasoning, write
from strat_reasoner.rollout import advance_chance
from strat_reasoner.vocabulary import Vocabulary


@dataclass
class Trace:
    """One turn of a teacher's game: what was seen, written and done."""

    seen: Decision
    opponent_intent: str
    my_intent: str
    action: str
    opponent_prediction: str = NONE
    my_prediction: str = END

    def words(self) -> list[str]:
        """The complete answer."""
        reasoning = Reasoning(
            self.opponent_intent, self.opponent_prediction, self.my_intent, self.action, self.my_prediction
        )
        return write(self.seen.facts.split(), reasoning, self.action)


class Teacher:
    """Plays and explains, imperfectly."""

    def __init__(self, config: TrainConfig) -> None:
        self.rules = config.warmstart
        self.game = get_game(config.game)
        self.spiel = load(self.game)
        self.table = mix(equilibrium(self.game), uniform_table(self.game), self.rules.equilibrium_share)

    def play(self, rng: np.random.Generator) -> list[Trace]:
        """One game of the teacher against itself."""
        state = self.spiel.new_initial_state()
        traces: list[Trace] = []
        while True:
            advance_chance(state, rng)
            if state.is_terminal():
                break
            traces.append(self._turn(state, traces[-1] if traces else None, rng))
        # What a turn says about the next one can only be filled in now.
        for turn, following in itertools.pairwise(traces):
            turn.my_prediction = self._about(following.action, following.seen.words, rng)
            following.opponent_prediction = self._about(turn.my_prediction, following.seen.words, rng)
        return traces

    def _turn(self, state: Any, previous: Trace | None, rng: np.random.Generator) -> Trace:
        seen = decision(self.game, state)
        believed = self._about(previous.my_intent, self.game.intents, rng) if previous else NONE
        policy = self._tilt(self.table[seen.infoset], seen, believed, state)
        meant = int(rng.choice(len(seen.legal), p=policy))
        done = meant if rng.random() < self.rules.intent_strength else int(rng.choice(len(seen.legal), p=policy))
        intent = self.game.intent(state, seen.seat, seen.legal[meant])
        trace = Trace(seen, believed, intent, seen.words[done])
        state.apply_action(seen.legal[done])
        return trace

    def _about(self, truth: str, choices: tuple[str, ...], rng: np.random.Generator) -> str:
        """The truth with probability `truth_share`, else one of all choices."""
        return truth if rng.random() < self.rules.truth_share else choices[int(rng.integers(len(choices)))]

    def _tilt(self, policy: np.ndarray, seen: Decision, believed: str, state: Any) -> np.ndarray:
        """Act on the belief: a stated bluff makes giving up less likely, a stated value bet more."""
        sign = {"bluff": -1.0, "value": 1.0}.get(believed, 0.0)
        gives_up = np.array([self.game.intent(state, seen.seat, action) == "fold" for action in seen.legal])
        weight = policy * np.exp(sign * self.rules.belief_logit * gives_up)
        return weight / weight.sum()


def trace_batch(
    teacher: Teacher, vocabulary: Vocabulary, games: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts (left-padded), answers (right-padded, end token included) and answer mask of `games` games."""
    traces = [trace for _ in range(games) for trace in teacher.play(rng)]
    prompt_BP = pad_prompts([vocabulary.prompt(trace.seen) for trace in traces], vocabulary.pad)
    answers = [[*vocabulary.encode(trace.words()), vocabulary.eos] for trace in traces]
    longest = max(len(answer) for answer in answers)
    answer_BA = torch.tensor([answer + [vocabulary.pad] * (longest - len(answer)) for answer in answers])
    mask_BA = torch.tensor([[1.0] * len(answer) + [0.0] * (longest - len(answer)) for answer in answers])
    return prompt_BP, answer_BA, mask_BA
