"""Event simulation of one training step: a pipeline schedule, its messages, and the collectives of every stage.

    timeline = simulate(schedule, work, OverlapPolicy(buckets=4))
    timeline.step_s, timeline.start_B, ...

One pipeline stands for all that are alike, so cost grows with stages x blocks, not with GPUs. What crosses a link that
several pipelines share is counted by `replicas`: their messages either go together or take turns (`stagger`). Tensor,
context and expert communication happens many times inside a block and is part of its duration; boundary messages,
gradient reductions and parameter gathers are transfers of their own on resources (`simulate_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.config import ConfigError
from scale_across.overlap import OverlapPolicy
from scale_across.schedule import Schedule
from scale_across.simulate_tables import Floats, Phase, Tables, Work, build_tables

__all__ = ["Phase", "StepTimeline", "Work", "run_tables", "simulate"]


@dataclass(frozen=True)
class StepTimeline:
    """When everything happened, in seconds from the start of the step; B blocks, stages one after another."""

    step_s: float
    compute_end_s: float
    """End of the last block."""
    tables: Tables
    work: Work
    start_B: Floats
    sent_B: Floats
    """Start of the message of a block on its resource; -1: none."""
    arrive_B: Floats
    begin_H: Floats
    """Start of every leg of every collective."""
    end_H: Floats
    """When its resource was free again; longer than the leg if messages came in between."""
    done_J: Floats

    @property
    def end_B(self) -> Floats:
        """End of every block."""
        return np.asarray(self.start_B + self.tables.duration_B)

    @cached_property
    def busy_s_S(self) -> Floats:
        """Seconds each stage computes."""
        return np.add.reduceat(self.tables.duration_B, self.tables.first_S[:-1])

    @property
    def bubble(self) -> float:
        """Share of the longest stage's span, from its first block to its last, in which it is idle."""
        first, end = self.tables.first_S, self.end_B
        span = end[first[1:] - 1] - self.start_B[first[:-1]]
        worst = int(np.argmax(span))
        return float(1 - self.busy_s_S[worst] / span[worst])

    @property
    def busy_s_R(self) -> Floats:
        """Seconds each resource carries something."""
        t = self.tables
        routed = t.route_B >= 0
        busy = np.bincount(
            t.resource_P[t.route_B[routed]], t.occupied_s_P[t.route_B[routed]], minlength=len(t.replicas_R)
        )
        return np.asarray(busy + np.bincount(t.resource_H, t.occupied_s_H, minlength=len(t.replicas_R)))

    def parts(self) -> dict[str, float]:
        """Seconds of the step by what the busiest stage does or waits for; they add up to `step_s`."""
        busy = float(self.busy_s_S.max())
        first_s = float(self.start_B[self.tables.first_S[:-1]].min())
        return {
            "compute_s": busy,
            "gather_s": first_s,
            "idle_s": self.compute_end_s - busy - first_s,
            "reduce_s": self.step_s - self.work.optimizer_s - self.compute_end_s,
            "optimizer_s": self.work.optimizer_s,
        }


def simulate(schedule: Schedule, work: Work, policy: OverlapPolicy | None = None) -> StepTimeline:
    """Run one step.

    Raises:
        ConfigError: the schedule's order cannot run to its end (a dependency is missing or circular).
    """
    policy = policy or OverlapPolicy()
    return run_tables(build_tables(schedule, work, policy), work, policy)


def run_tables(tables: Tables, work: Work, policy: OverlapPolicy) -> StepTimeline:
    """The kernel on prepared tables."""
    from scale_across import simulate_kernel as kernel  # imports numba

    blocks = len(tables.duration_B)
    start_B, sent_B = np.zeros(blocks), np.full(blocks, kernel.UNKNOWN)
    arrive_B, waiter_B = np.full(blocks, kernel.UNKNOWN), np.full(blocks, -1, np.int32)
    free_R = np.zeros(len(tables.replicas_R))
    begin_H, end_H = np.zeros(len(tables.resource_H)), np.zeros(len(tables.resource_H))
    done_J = np.where(tables.released_J, kernel.UNKNOWN, 0.0)
    common = (
        tables.first_S, tables.duration_B, tables.depends_B, tables.route_B, tables.resource_P, tables.occupied_s_P,
        tables.latency_s_P, policy.send_exposed, free_R, start_B, sent_B, arrive_B, waiter_B,
    )  # fmt: skip
    if len(done_J) == 0 and policy.early_receive and _one_sender_each(tables):
        ran = kernel.run_fixed(*common[:-1])
    else:
        ran = kernel.run_events(
            *common, tables.special_B, tables.gate_X, tables.trigger_X, tables.item_T, tables.share_T, tables.phase_J,
            tables.resource_H, tables.occupied_s_H, tables.latency_s_H, begin_H, end_H, done_J,
            policy.pipeline_priority, policy.early_receive,
        )  # fmt: skip
    if ran < blocks:
        raise ConfigError(f"schedule: only {ran} of {blocks} blocks can run; its order waits for itself")
    ends = float((start_B + tables.duration_B).max())
    step_s = max(ends, float(done_J.max(initial=0.0))) + work.optimizer_s
    return StepTimeline(step_s, ends, tables, work, start_B, sent_B, arrive_B, begin_H, end_H, done_J)


def _one_sender_each(tables: Tables) -> bool:
    """Whether no resource is used by two routes that are in use, so that its queue is one stage's order."""
    used = tables.resource_P[np.unique(tables.route_B[tables.route_B >= 0])]
    return len(np.unique(used)) == len(used)
