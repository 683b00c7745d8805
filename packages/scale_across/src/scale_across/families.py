"""The pipeline schedules that a plan may choose, what each needs, and how it is made.

`1f1b` with more than one chunk is interleaved 1F1B. `cross` and `cross_v` are made for the links of the plan: a greedy
that knows delays and the memory that is left (CrossPipe's idea), over the stages in a row or in a V inside each site,
with the microbatch whole or cut into sequence slices at the price of longer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.config import ConfigError
from scale_across.lower_bound import LOCAL, LOOP, WAVE, Family
from scale_across.pipeline import Pipeline, Rule, Run, greedy
from scale_across.schedule import Schedule
from scale_across.schedules_cross import SLICE_PRICE
from scale_across.schedules_static import breadth_first, interleaved, zb_h1, zb_h2, zb_v
from scale_across.simulate_tables import Floats

CROSS_RULES = (
    Rule(rank=(1.0, 0.0, 2.0), patience_s=0.0),
    Rule(rank=(1.0, 0.0, 2.0), patience_s=0.5),
    Rule(rank=(0.0, 1.0, 2.0), patience_s=0.0),
)
"""Greedy rules tried for a cross-site schedule; patience in block times."""


@dataclass(frozen=True)
class ScheduleFamily:
    """One way to order the blocks of a pipeline."""

    name: str
    split: bool
    """Input and weight gradients are blocks of their own (then without full recompute, which would serve both)."""
    devices: int = LOOP
    slices: int = 1
    made_for_links: bool = False
    """Only where the pipeline crosses sites."""

    @property
    def price(self) -> float:
        """How much longer blocks take because of slices."""
        return SLICE_PRICE[self.slices]

    def possible(self, pp: int, chunks: int, microbatches: int) -> bool:
        """Whether it is defined for these degrees, and is not the same as a simpler one."""
        if self.name == "1f1b":
            return chunks == 1 or microbatches % pp == 0
        if pp == 1:
            return False
        if self.name == "breadth_first":
            return chunks > 1
        return chunks == (1 if self.devices == LOOP else 2)

    def held(self, pp: int, chunks: int, microbatches: int) -> int:
        """Most chunk-microbatches of activations on one stage (the least that works where the memory decides)."""
        everything = microbatches * chunks
        if self.name == "1f1b":
            return min(pp * chunks + pp - 1 if chunks > 1 else pp, everything)
        if self.name == "breadth_first":
            return everything
        return min(2 * pp - 1 if self.name == "zb_h2" else pp * chunks, everything)

    def numbers(self, pp: int, chunks: int, microbatches: int) -> Family:
        """What the lower bound needs."""
        ordered = chunks == 1 and not self.made_for_links
        first = float(self.held(pp, chunks, microbatches)) if ordered else (-1.0 if self.made_for_links else 0.0)
        last = (2.0 if self.name == "zb_h2" else 1.0) if ordered else 0.0
        held = float(self.held(pp, chunks, microbatches))
        return Family(int(self.split), self.devices, float(self.slices), self.price, held, first, last)


FAMILIES = (
    ScheduleFamily("1f1b", split=False),
    ScheduleFamily("breadth_first", split=False),
    ScheduleFamily("zb_h1", split=True),
    ScheduleFamily("zb_h2", split=True),
    ScheduleFamily("zb_v", split=True, devices=WAVE),
    *(
        ScheduleFamily(name if slices == 1 else f"{name}_x{slices}", True, devices, slices, made_for_links=True)
        for name, devices in (("cross", LOOP), ("cross_v", LOCAL))
        for slices in (1, 2, 4)
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
RELAXED = Family(1, LOOP, 4.0, 0.0, 0.0, 0.0, 0.0)
"""No family is faster than this says, for one chunk; see `relaxed`."""


@dataclass(frozen=True)
class Links:
    """What a schedule made for links must know: the site of every stage, and the slowest hop between two of them."""

    site_S: tuple[int, ...]
    occupied_s: float
    latency_s: float
    limit: int
    """Most whole-stage microbatches of activations that fit."""


def build(family: ScheduleFamily, pp: int, chunks: int, microbatches: int) -> Schedule:
    """A schedule that does not depend on the links."""
    if family.name == "1f1b":
        return interleaved(pp, microbatches, chunks)
    if family.name == "breadth_first":
        return breadth_first(pp, microbatches, chunks)
    return {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v}[family.name](pp, microbatches)


def build_for_links(
    family: ScheduleFamily, microbatches: int, duration_KV: Floats, links: Links
) -> tuple[Schedule, ...]:
    """Candidates of a cross-site family: one per greedy rule that fits the memory.

    Raises:
        ConfigError: no rule fits.
    """
    stages = len(links.site_S)
    devices = list(range(stages)) if family.devices == LOOP else local_devices(links.site_S)
    device_V = np.asarray(devices, np.int32)
    site_V = np.asarray(links.site_S)[device_V]
    hops = site_V[1:] != site_V[:-1]
    link_V = np.append(np.where(hops, 2 * np.minimum(site_V[1:], site_V[:-1]), -1), -1).astype(np.int32)
    link_V[:-1] += np.where(hops & (site_V[1:] < site_V[:-1]), 1, 0)
    chunks = len(devices) // stages
    pipeline = Pipeline(
        device_V, stages, microbatches, family.slices, np.ascontiguousarray(duration_KV[:3]), link_V,
        links.occupied_s / family.slices, links.latency_s,
        np.full(stages, min(links.limit, microbatches) * chunks * family.slices, np.int32),
    )  # fmt: skip
    block_s = float(duration_KV[0].max())
    found = []
    for rule in CROSS_RULES:
        run = _tried(pipeline, family.name, Rule(rank=rule.rank, patience_s=rule.patience_s * block_s))
        if run is not None:
            found.append(run.schedule)
    if not found:
        raise ConfigError(f"{family.name}: memory for {links.limit} microbatches is too little for every greedy rule")
    return tuple(found)


def _tried(pipeline: Pipeline, name: str, rule: Rule) -> Run | None:
    try:
        return greedy(pipeline, name, rule)
    except ConfigError:
        return None


def local_devices(site_S: Sequence[int]) -> list[int]:
    """A V inside each site, sites of any size: data crosses between neighbours once each way."""
    devices: list[int] = []
    for site in dict.fromkeys(site_S):
        mine = [stage for stage, at in enumerate(site_S) if at == site]
        devices += [*mine, *reversed(mine)]
    return devices
