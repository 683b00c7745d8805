"""One data-parallel learner rank: gradients of its shard, averaged over the ranks by whoever knows the network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from strat_reasoner.config import TrainConfig
from strat_reasoner.objective import Shard, surrogate
from strat_reasoner.policy import answer_logprobs, build_model, flatten, numpy_rng, unflatten
from strat_reasoner.vocabulary import Vocabulary
from strat_reasoner.warmstart import Teacher, trace_batch

ReduceMean = Callable[[torch.Tensor], None]
"""Replaces a flat float32 vector by its mean over the learner ranks, in place and bit-identical on all."""

MICROBATCH = 128
"""Samples per forward and backward pass: bounds the activations."""


class Learner:
    """Policy, reference, optimizer.

    Args:
        config: the run's configuration.
        rank: this rank's place among `world` learner ranks.
        reduce_mean: gradient exchange; not needed for one rank.
    """

    def __init__(
        self, config: TrainConfig, rank: int = 0, world: int = 1, reduce_mean: ReduceMean | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.rank, self.world, self.reduce_mean = config, rank, world, reduce_mean
        self.vocabulary = Vocabulary.for_games([config.game])
        self.model = build_model(config.model, self.vocabulary, config.seed)
        self.reference = build_model(config.model, self.vocabulary, config.seed)
        self.reference.requires_grad_(False)
        self.step = 0
        self._new_optimizer(config.optimizer.learning_rate)

    def _new_optimizer(self, learning_rate: float) -> None:
        o = self.config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay
        )

    # -- reinforcement learning ----------------------------------------------------------------------------------------

    def update(self, shard: Shard) -> dict[str, float]:
        """One step on this rank's shard (several with `epochs` > 1); returns statistics of the shard.

        With `world` ranks, each on its own shard, the update equals that of one rank on the whole batch up to the order
        of floating-point sums.
        """
        o, progress = self.config.optimizer, self.step / max(1, self.config.steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = o.learning_rate * (o.final_share + (1 - o.final_share) * cosine)
        statistics: dict[str, float] = {}
        for _ in range(self.config.objective.epochs):
            self.optimizer.zero_grad(set_to_none=True)
            statistics = self._accumulate(shard)
            statistics["grad_norm"] = self._apply(o.grad_clip)
        self.step += 1
        return statistics

    def _accumulate(self, shard: Shard) -> dict[str, float]:
        totals: dict[str, float] = {}
        temperature, pad = self.config.rollout.temperature, self.vocabulary.pad
        for start in range(0, len(shard), MICROBATCH):
            rows = slice(start, start + MICROBATCH)
            prompt, answer, mask, old = self._cropped(shard, rows)
            with torch.no_grad():
                reference = answer_logprobs(self.reference, prompt, answer, mask, pad, temperature)
            logprob = answer_logprobs(self.model, prompt, answer, mask, pad, temperature)
            loss, statistics = surrogate(
                logprob,
                old,
                reference,
                mask,
                torch.tensor(shard.advantage_N[rows]),
                torch.tensor(shard.weight_N[rows]),
                self.config.objective,
            )
            (loss * self.world).backward()  # the mean over ranks then is the sum over shards
            for name, value in statistics.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _cropped(self, shard: Shard, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompt, answer, mask and old log-probabilities without the columns that only pad: a third of the work."""
        mask_NA = shard.mask_NA[rows]
        length = int(mask_NA.any(0).sum())
        lead = int((shard.prompt_NP[rows] == self.vocabulary.pad).all(0).sum())
        return (
            torch.tensor(shard.prompt_NP[rows, lead:]).long(),
            torch.tensor(shard.answer_NA[rows, :length]).long(),
            torch.tensor(mask_NA[:, :length]).float(),
            torch.tensor(shard.logprob_NA[rows, :length]),
        )

    def _apply(self, grad_clip: float) -> float:
        """Exchange gradients, clip their norm, step. Returns the norm before clipping."""
        parameters = list(self.model.parameters())
        if self.world > 1 and self.reduce_mean:
            flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
            self.reduce_mean(flat)
            offset = 0
            for parameter in parameters:
                parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
        norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        self.optimizer.step()
        return float(norm)

    # -- warm start ----------------------------------------------------------------------------------------------------

    def warm_start(self) -> list[float]:
        """All supervised steps; the result becomes the reference. Returns the loss per step."""
        losses = self.warm_start_steps(range(self.config.warmstart.steps))
        self.use_as_reference()
        return losses

    def warm_start_steps(self, steps: range) -> list[float]:
        """Supervised steps on traces of imperfect play, as a part of `warmstart.steps`; returns their losses."""
        w = self.config.warmstart
        if steps.start == 0:
            self.teacher = Teacher(self.config)
            self._new_optimizer(w.learning_rate)
        losses = []
        for step in steps:
            cosine = 0.5 * (1 + math.cos(math.pi * step / w.steps))
            for group in self.optimizer.param_groups:
                group["lr"] = w.learning_rate * max(0.02, min(1.0, (step + 1) / 20) * cosine)
            rng = numpy_rng(self.config.seed, "traces", self.rank, step)
            games = w.batch_games * (self.rank + 1) // self.world - w.batch_games * self.rank // self.world
            prompt, answer, mask = trace_batch(self.teacher, self.vocabulary, games, rng)
            self.optimizer.zero_grad(set_to_none=True)
            logprob = answer_logprobs(self.model, prompt, answer, mask, self.vocabulary.pad)
            loss = -logprob.sum() / mask.sum()
            loss.backward()
            self._apply(1.0)
            losses.append(float(loss.detach()))
        return losses

    def use_as_reference(self) -> None:
        """Make the current weights the reference of the KL term, and start the optimizer afresh."""
        unflatten(self.reference, flatten(self.model))
        self._new_optimizer(self.config.optimizer.learning_rate)
        self.step = 0

    # -- state ---------------------------------------------------------------------------------------------------------

    def flat_weights(self) -> torch.Tensor:
        """The policy's weights as one vector."""
        return flatten(self.model)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that a resumed run needs, as tensors and JSON values. Random streams are keyed by step: no state."""
        tensors = {"policy": flatten(self.model), "reference": flatten(self.reference)}
        for index, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{index}.{name}"] = value.clone()
        meta = {
            "step": self.step,
            "vocabulary": list(self.vocabulary.words),
            "config": self.config.model_dump(mode="json"),
        }
        return tensors, meta

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            ValueError: the state belongs to another vocabulary or model size.
        """
        if list(meta["vocabulary"]) != list(self.vocabulary.words):
            raise ValueError("the checkpoint was made with another vocabulary; train it with the same games")
        unflatten(self.model, tensors["policy"])
        unflatten(self.reference, tensors["reference"])
        self._new_optimizer(self.config.optimizer.learning_rate)
        for index, parameter in enumerate(self.model.parameters()):
            prefix = f"optimizer.{index}."
            stored = {name.removeprefix(prefix): t.clone() for name, t in tensors.items() if name.startswith(prefix)}
            if stored:
                self.optimizer.state[parameter] = stored
        self.step = int(meta["step"])
