"""The training loop over roles. The roles may be objects of this process or actors at several sites; the loop is one.

rollouts → comparison → learner ranks → weights back to the rollouts
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from strat_reasoner.comparer import Comparer
from strat_reasoner.config import TrainConfig
from strat_reasoner.learner import Learner
from strat_reasoner.objective import Shard
from strat_reasoner.rollout import RolloutBatch, RolloutWorker

PHASES = ("rollout", "comparison", "learner", "weight_sync")


class Roles(Protocol):
    """Who does the work of a step. Each call returns when its phase is over; handles are opaque to the loop."""

    def collect(self, step: int) -> Any:
        """Play this step's games; returns a handle of the batches."""
        ...

    def compare(self, batches: Any) -> tuple[Any, dict[str, float]]:
        """Score the batches; returns a handle of the shards, and statistics."""
        ...

    def update(self, shards: Any) -> dict[str, float]:
        """Train on the shards; returns statistics."""
        ...

    def sync_weights(self) -> None:
        """Give the learner's weights to the rollout workers."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """One step: seconds per phase (`PHASES`) and statistics."""

    step: int
    seconds: dict[str, float]
    metrics: dict[str, float]

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def run_step(roles: Roles, step: int) -> StepRecord:
    """One synchronous step, phase after phase."""
    marks = [time.monotonic()]
    batches = roles.collect(step)
    marks.append(time.monotonic())
    shards, compared = roles.compare(batches)
    marks.append(time.monotonic())
    learned = roles.update(shards)
    marks.append(time.monotonic())
    roles.sync_weights()
    marks.append(time.monotonic())
    seconds = {phase: stop - start for phase, start, stop in zip(PHASES, marks, marks[1:], strict=False)}
    return StepRecord(step, seconds, compared | {f"train/{name}": value for name, value in learned.items()})


def train(roles: Roles, steps: range, on_step: Callable[[StepRecord], None] | None = None) -> list[StepRecord]:
    """Run `steps`; `on_step` is called after each (progress, tracking, checkpoints)."""
    records = []
    for step in steps:
        records.append(run_step(roles, step))
        if on_step:
            on_step(records[-1])
    return records


class LocalRoles:
    """All roles in this process: for tests, debugging and small studies."""

    def __init__(self, config: TrainConfig) -> None:
        self.rollout = RolloutWorker(config)
        self.comparer = Comparer(config)
        self.learner = Learner(config)

    def collect(self, step: int) -> list[RolloutBatch]:
        """See `Roles`."""
        return [self.rollout.collect(step)]

    def compare(self, batches: list[RolloutBatch]) -> tuple[list[Shard], dict[str, float]]:
        """See `Roles`."""
        return self.comparer.process(batches)

    def update(self, shards: list[Shard]) -> dict[str, float]:
        """See `Roles`."""
        return self.learner.update(shards[0])

    def sync_weights(self) -> None:
        """See `Roles`."""
        self.rollout.load_weights(self.weights())

    def weights(self) -> torch.Tensor:
        """The learner's current weights."""
        return self.learner.flat_weights()
