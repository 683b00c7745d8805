"""Running pipeline schedules over links between sites: given orders, and orders made while running (greedy).

The model of CrossPipe (arXiv 2507.00217): a block starts when its stage is free and what it needs has arrived. A
message between sites takes the link of its direction for `occupied_s`, after those before it, and arrives `latency_s`
later; inside a site it arrives at once. Two kinds of transfer:

- asynchronous: a message leaves when its block has ended and the link is free;
- rendezvous: it also waits until the receiver has posted its receive, which is when the last F or D before the
  receiving block has ended there (a W may run meanwhile). Static schedules behave so under delays unknown to them.

In a chain of sites every direction of a boundary has one sending and one receiving stage, so the link's order is the
sender's (asynchronous) or the receiver's (rendezvous). A unit is one slice of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from scale_across import pipeline_kernel as kernel
from scale_across.schedule import Schedule, virtual_of_chunk

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pipeline:
    """What is to be run: devices of virtual stages, block times, links, memory."""

    device_V: Ints
    stages: int
    microbatches: int
    slices: int
    duration_KV: Floats
    """[F, D, W] x virtual stage, seconds per unit."""
    link_V: Ints
    """Directed link of the message from virtual stage v to v + 1; -1 inside a site. Its reverse is the next number."""
    occupied_s: float
    latency_s: float
    limit_units_S: Ints
    """Most activations a stage may hold, in the measure of the next two."""
    hold_f: int = 1
    """What a unit of a chunk holds from the start of F to the end of W."""
    hold_d: int = 0
    """What it holds besides from the start of D, when F kept a checkpoint only and D computes it again."""
    inside_s_V: Floats | None = None
    """Seconds that the greedy adds to a message from virtual stage v to v + 1 or back, without queues; None: none."""

    @classmethod
    def uniform(
        cls,
        devices: Sequence[int],
        stages: int,
        microbatches: int,
        *,
        f_s: float,
        d_s: float,
        w_s: float,
        limit_units_S: Sequence[int],
        sites: int = 1,
        occupied_s: float = 0.0,
        latency_s: float = 0.0,
        slices: int = 1,
        slice_price: float = 0.0,
        hold_f: int = 1,
        hold_d: int = 0,
    ) -> Pipeline:
        """Equal chunks, `sites` equal groups of stages in a chain, slices of equal length.

        Args:
            f_s, d_s, w_s: seconds of a whole microbatch on a whole stage.
            occupied_s: seconds that a whole microbatch's message keeps the link.
            slice_price: how much longer the slices together take than the whole.
        """
        device_V = np.asarray(devices, np.int32)
        chunks = len(device_V) / stages
        site_V = device_V // (stages // sites)
        low, high = np.minimum(site_V[:-1], site_V[1:]), np.maximum(site_V[:-1], site_V[1:])
        if (high - low > 1).any():
            raise ConfigError("pipeline: a message skips a site; sites must form a chain")
        crossing = 2 * low + (site_V[1:] < site_V[:-1])
        link_V = np.append(np.where(high > low, crossing, -1), -1).astype(np.int32)
        whole = np.array([f_s, d_s, w_s])[:, None] / chunks / slices * (1 + slice_price)
        return cls(
            device_V, stages, microbatches, slices, np.repeat(whole, len(device_V), axis=1), link_V,
            occupied_s / slices, latency_s, np.asarray(limit_units_S, np.int32), hold_f, hold_d,
        )  # fmt: skip

    @property
    def busy_s(self) -> float:
        """Seconds that the busiest stage computes."""
        per_unit = np.bincount(self.device_V, self.duration_KV.sum(axis=0), minlength=self.stages)
        return float(per_unit.max() * self.microbatches * self.slices)


@dataclass(frozen=True)
class Run:
    """A schedule with times, in seconds from the start."""

    schedule: Schedule
    start_SN: Floats
    end_SN: Floats

    @property
    def makespan_s(self) -> float:
        """End of the last block."""
        return float(self.end_SN.max())


@dataclass(frozen=True)
class Rule:
    """How the greedy chooses: ranks of F, D and W (lower first), preference of later chunks, and when a W waits."""

    rank: tuple[float, float, float] = (1.0, 0.0, 2.0)
    late_first: float = 0.01
    patience_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0


def greedy(pipeline: Pipeline, name: str, rule: Rule | None = None) -> Run:
    """Make a schedule by running it: every stage takes the best block that it can start.

    Raises:
        ConfigError: no block can start before all are done (the memory limit is too small).
    """
    rule = rule or Rule()
    p = pipeline
    virtual_SC = virtual_of_chunk(p.device_V, p.stages)
    units, virtuals = p.microbatches * p.slices, len(p.device_V)
    blocks_S = 3 * units * np.bincount(p.device_V, minlength=p.stages)
    table_SN4 = np.full((p.stages, int(blocks_S.max()), 4), -1, np.int32)
    start_SN = np.zeros(table_SN4.shape[:2])
    rank_KV = np.repeat(np.array(rule.rank)[:, None], virtuals, axis=1)
    rank_KV[0] -= rule.late_first * np.arange(virtuals)
    rank_KV[1] -= rule.late_first * np.arange(virtuals)[::-1] * 0.1
    jitter_U = np.random.default_rng(rule.seed).random(1021) * rule.jitter
    ran = kernel.run_greedy(
        p.device_V, virtual_SC, units, p.slices, p.duration_KV, p.link_V, p.occupied_s, p.latency_s,
        np.zeros(virtuals) if p.inside_s_V is None else p.inside_s_V, p.limit_units_S, p.hold_f, p.hold_d,
        p.slices * p.hold_f + p.hold_d, rank_KV, rule.patience_s, jitter_U, table_SN4, start_SN,
    )  # fmt: skip
    if ran < blocks_S.sum():
        raise ConfigError(f"greedy {name!r}: stuck after {ran} of {blocks_S.sum()} blocks; raise the memory limit")
    schedule = Schedule.from_table(name, table_SN4, p.device_V.tolist())
    length_SN = p.duration_KV[np.maximum(schedule.kind_SN, 0), np.maximum(schedule.virtual_SN, 0)]
    return Run(schedule, start_SN, np.where(schedule.kind_SN >= 0, start_SN + length_SN, 0.0))


def run(schedule: Schedule, pipeline: Pipeline, rendezvous: bool = False) -> Run:
    """Run a schedule in its order over a pipeline's links.

    Raises:
        ConfigError: its order waits for itself.
    """
    p = pipeline
    start_SN, end_SN = np.zeros(schedule.kind_SN.shape), np.zeros(schedule.kind_SN.shape)
    count_S = (schedule.kind_SN >= 0).sum(axis=1).astype(np.int32)
    ran = kernel.run_fixed(
        schedule.kind_SN, units_of(schedule), schedule.virtual_SN, count_S, schedule.virtuals,
        schedule.microbatches * schedule.slices, schedule.slices, p.duration_KV, p.link_V, p.occupied_s, p.latency_s,
        rendezvous, start_SN, end_SN,
    )  # fmt: skip
    if ran < count_S.sum():
        raise ConfigError(f"schedule {schedule.name!r}: only {ran} of {count_S.sum()} blocks can run")
    return Run(schedule, start_SN, end_SN)


def units_of(schedule: Schedule) -> Ints:
    """[stage, place] unit of every block."""
    return (schedule.microbatch_SN * schedule.slices + schedule.slice_SN).astype(np.int32)


def anneal(
    found: Run, pipeline: Pipeline, *, proposals: int, heat_s: float, target_s: float = 0.0, seed: int = 0
) -> Run:
    """Local search over the orders of all stages from `found`; never worse, deterministic for a seed.

    Stops when `target_s` is met: a proven bound makes more work useless.
    """
    p, schedule = pipeline, found.schedule
    kind_SN, virtual_SN = schedule.kind_SN.copy(), schedule.virtual_SN.copy()
    count_S = (kind_SN >= 0).sum(axis=1).astype(np.int32)
    best_s = kernel.anneal(
        kind_SN, virtual_SN, count_S, len(p.device_V), p.microbatches * p.slices, p.slices, p.duration_KV, p.link_V,
        p.occupied_s, p.latency_s, p.limit_units_S, p.hold_f, p.hold_d, target_s, proposals, heat_s, seed,
    )  # fmt: skip
    if not best_s < found.makespan_s - 1e-12:
        return found
    return run(from_words(schedule.name, kind_SN, virtual_SN, p), p)


def from_words(name: str, kind_SN: npt.NDArray[np.int8], virtual_SN: Ints, pipeline: Pipeline) -> Schedule:
    """A schedule from kinds and virtual stages alone: units of a virtual stage follow one another."""
    p = pipeline
    unit_SN = np.zeros(kind_SN.shape, np.int32)
    virtual_SC = virtual_of_chunk(p.device_V, p.stages)
    chunk_V = np.zeros(len(p.device_V), np.int32)
    for row in virtual_SC:
        chunk_V[row[row >= 0]] = np.nonzero(row >= 0)[0]
    for stage in range(p.stages):
        count = int((kind_SN[stage] >= 0).sum())
        kernel.number_units(
            kind_SN[stage], virtual_SN[stage], count, p.slices, len(p.device_V), 2**30, 0, 0, unit_SN[stage]
        )
    table = np.stack([kind_SN, unit_SN // p.slices, chunk_V[np.maximum(virtual_SN, 0)], unit_SN % p.slices], axis=2)
    return Schedule.from_table(name, table.astype(np.int32), p.device_V.tolist())
