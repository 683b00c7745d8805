"""The pipeline schedules that a plan may choose, what each needs, and how it is made.

`1f1b` with more than one chunk is interleaved 1F1B. `cross`, `cross_wave` and `cross_v` are made for the links of the
plan: a greedy that knows delays and the memory that is left (CrossPipe's idea), over the stages in a row, to and fro,
or in a V inside each site, with the microbatch whole or cut into sequence slices at the price of longer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from scale_across.lower_bound import (
    ALL_HELD,
    LOCAL,
    LOOP,
    MEMORY_HELD,
    ONCE_HELD,
    PLAIN,
    TWICE_HELD,
    WAVE,
)
from scale_across.pipeline import Pipeline, Rule, Run, greedy
from scale_across.schedule import Schedule, wave_devices
from scale_across.schedules_cross import SLICE_PRICE
from scale_across.schedules_static import breadth_first, interleaved, zb_h1, zb_h2, zb_v
from scale_across.simulate_input import StageSites
from scale_across.simulate_tables import Floats

Ints = npt.NDArray[np.int64]
CROSS_RULES = (
    Rule(rank=(1.0, 0.0, 2.0), patience_s=0.0),
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
    place: str = "anywhere"
    """`inside`: only for pipelines inside a site; `across`: only for those that cross sites, made for the links."""

    @property
    def price(self) -> float:
        """How much longer blocks take because of slices."""
        return SLICE_PRICE[self.slices]

    def last_stage(self, pp: int, sites: StageSites | None) -> int:
        """The stage that holds the head."""
        if self.devices == WAVE:
            return 0
        return sites.site_S.index(sites.site_S[-1]) if self.devices == LOCAL and sites is not None else pp - 1

    def code(self) -> tuple[float, ...]:
        """As a row of CODES."""
        kind = {"1f1b": PLAIN, "breadth_first": ALL_HELD, "zb_h2": TWICE_HELD}.get(self.name, ONCE_HELD)
        kind = MEMORY_HELD if self.place == "across" else kind
        return float(kind), float(self.split), float(self.devices), float(self.slices), self.price


FAMILIES = (
    ScheduleFamily("1f1b", split=False),
    ScheduleFamily("breadth_first", split=False, place="inside"),
    ScheduleFamily("zb_h1", split=True, place="inside"),
    ScheduleFamily("zb_h2", split=True, place="inside"),
    ScheduleFamily("zb_v", split=True, devices=WAVE, place="inside"),
    ScheduleFamily("cross_wave", split=True, devices=WAVE, place="across"),
    *(
        ScheduleFamily(name if slices == 1 else f"{name}_x{slices}", True, devices, slices, place="across")
        for name, devices in (("cross", LOOP), ("cross_v", LOCAL))
        for slices in (1, 2, 4)
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
CODES = np.array([family.code() for family in FAMILIES])
"""[family, (kind, split, devices, slices, price)] for the kernel."""
MIN_TOKENS_PER_SLICE = 1024


def possible(
    family: ScheduleFamily, pp_N: Ints, chunks_N: Ints, microbatches_N: Ints, tokens_N: Ints
) -> npt.NDArray[np.bool_]:
    """Where it is defined, and not the same as a simpler one; `tokens_N` are those of a rank's sequence."""
    if family.name == "1f1b":
        return np.asarray((chunks_N == 1) | (microbatches_N % pp_N == 0))
    fits = (pp_N > 1) & (tokens_N % family.slices == 0)
    if family.slices > 1:
        fits &= tokens_N // family.slices >= MIN_TOKENS_PER_SLICE
    if family.name == "breadth_first":
        return np.asarray(fits & (chunks_N > 1))
    return np.asarray(fits & (chunks_N == (1 if family.devices == LOOP else 2)))


@dataclass(frozen=True)
class Links:
    """What a schedule made for links must know: the site of every stage, and the slowest hop between two of them."""

    site_S: tuple[int, ...]
    occupied_s: float
    latency_s: float
    limit: int
    """Most whole-stage microbatches of activations that fit."""
    exposed: float
    """Share of a message that its sender waits for."""
    inside_s: float
    """Seconds of a message inside a site."""


@lru_cache(maxsize=256)
def build(family: str, pp: int, chunks: int, microbatches: int) -> Schedule:
    """A schedule that does not depend on the links."""
    if family == "1f1b":
        return interleaved(pp, microbatches, chunks)
    if family == "breadth_first":
        return breadth_first(pp, microbatches, chunks)
    return {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v}[family](pp, microbatches)


def build_for_links(family: ScheduleFamily, microbatches: int, duration_KV: Floats, links: Links) -> Schedule | None:
    """The shortest schedule of all greedy rules by the greedy's own clock; None when none fits the memory."""
    return _built_for_links(family, microbatches, duration_KV[:3].tobytes(), links)


@lru_cache(maxsize=64)
def _built_for_links(family: ScheduleFamily, microbatches: int, durations: bytes, links: Links) -> Schedule | None:
    """Plans that differ only in reductions or sharding share schedules, and a search sees them one after another."""
    stages = len(links.site_S)
    if family.devices == LOCAL:
        devices = local_devices(links.site_S)
    else:
        devices = list(range(stages)) if family.devices == LOOP else wave_devices(stages, 2)
    device_V = np.asarray(devices, np.int32)
    duration_KV = np.frombuffer(durations).reshape(3, len(devices)).copy()
    site_V = np.asarray(links.site_S)[device_V]
    hops = site_V[1:] != site_V[:-1]
    link_V = np.append(np.where(hops, 2 * np.minimum(site_V[1:], site_V[:-1]), -1), -1).astype(np.int32)
    link_V[:-1] += np.where(hops & (site_V[1:] < site_V[:-1]), 1, 0)
    wait_s = links.exposed * links.occupied_s / family.slices
    duration_KV[0, :-1] += np.where(hops, wait_s, 0.0)
    duration_KV[1, 1:] += np.where(hops, wait_s, 0.0)
    inside_s_V = np.append(np.where(hops | (device_V[1:] == device_V[:-1]), 0.0, links.inside_s), 0.0)
    chunks = len(devices) // stages
    pipeline = Pipeline(
        device_V, stages, microbatches, family.slices, duration_KV, link_V,
        links.occupied_s / family.slices, links.latency_s,
        np.full(stages, links.limit * chunks * family.slices, np.int32), inside_s_V=inside_s_V,
    )  # fmt: skip
    block_s = float(duration_KV[0].max())
    rules = [Rule(rank=rule.rank, patience_s=rule.patience_s * block_s) for rule in CROSS_RULES]
    runs = [run for run in (_tried(pipeline, family.name, rule) for rule in rules) if run is not None]
    return min(runs, key=lambda run: run.makespan_s).schedule if runs else None


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
