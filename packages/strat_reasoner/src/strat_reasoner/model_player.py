"""A trained model as a player: it writes its reasoning and then moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strat_reasoner.config import RolloutConfig
from strat_reasoner.games import Decision, Move
from strat_reasoner.generate import Sampler
from strat_reasoner.policy import answer_logprobs, pad_prompts
from strat_reasoner.reasoning import ANSWER, END_ANSWER
from strat_reasoner.rollout import chosen_action, parse_answer
from strat_reasoner.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BATCH = 512


class ModelPlayer:
    """Plays by sampling answers from a model at the training temperature."""

    def __init__(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, rules: RolloutConfig, name: str = "model"
    ) -> None:
        self.model, self.vocabulary, self.rules, self.name = model, vocabulary, rules, name
        self.sampler = Sampler(model, vocabulary.pad, vocabulary.eos)

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        moves = []
        for seen, ids in zip(decisions, self._answers(decisions, rng), strict=True):
            parsed = parse_answer(self.vocabulary, ids)
            text = " ".join(self.vocabulary.decode(ids))
            moves.append(Move(chosen_action(parsed, seen), text, parsed.well_formed))
        return moves

    def _answers(self, decisions: Sequence[Decision], rng: np.random.Generator) -> list[list[int]]:
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        r = self.rules
        answers: list[list[int]] = []
        for start in range(0, len(decisions), BATCH):
            prompts = [self.vocabulary.prompt(seen) for seen in decisions[start : start + BATCH]]
            prompt_BP = pad_prompts(prompts, self.vocabulary.pad)
            drawn = self.sampler.sample(prompt_BP, r.max_answer_tokens, generator, r.temperature, r.top_k, r.top_p)
            answers += drawn.ids_BA.tolist()
        return answers

    def action_probabilities(
        self, decisions: Sequence[Decision], samples: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Sample reasonings; for each, the exact probability of each legal move and of closing the answer after it.

        Returns:
            Per decision an array (samples, legal actions). A sample whose text before the move is malformed is a row of
            zeros. Exact for temperature sampling; with top-k or top-p it is the untruncated probability.
        """
        repeated = [seen for seen in decisions for _ in range(samples)]
        answers = self._answers(repeated, rng)
        rows = [np.zeros(len(seen.legal)) for seen in repeated]
        cases: list[tuple[int, int, list[int], list[int]]] = []  # (row, move, prompt, answer)
        opening = self.vocabulary.ids[ANSWER]
        closing = [self.vocabulary.ids[END_ANSWER], self.vocabulary.eos]
        for row, (seen, ids) in enumerate(zip(repeated, answers, strict=True)):
            if opening not in ids:
                continue
            reasoning = ids[: ids.index(opening) + 1]
            prompt = self.vocabulary.prompt(seen) + reasoning
            for move, word in enumerate(seen.words):
                ending = [self.vocabulary.ids[word], *closing]
                if parse_answer(self.vocabulary, reasoning + ending).well_formed:
                    cases.append((row, move, prompt, ending))
        for start in range(0, len(cases), BATCH):
            part = cases[start : start + BATCH]
            prompt_BP = pad_prompts([case[2] for case in part], self.vocabulary.pad)
            ending_BA = torch.tensor([case[3] for case in part])
            with torch.no_grad():
                logprob_BA = answer_logprobs(
                    self.model,
                    prompt_BP,
                    ending_BA,
                    torch.ones_like(ending_BA).float(),
                    self.vocabulary.pad,
                    self.rules.temperature,
                )
            for (row, move, _, _), logprob in zip(part, logprob_BA.sum(1).exp().tolist(), strict=True):
                rows[row][move] = logprob
        return [np.stack(rows[i * samples : (i + 1) * samples]) for i in range(len(decisions))]
