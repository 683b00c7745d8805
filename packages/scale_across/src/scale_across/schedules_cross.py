"""Schedules made for the links between sites: greedy and annealed, unidirectional, wave, local V, with sequence slices.

CrossPipe (arXiv 2507.00217) has a greedy one (CrossUDSub) and two from a constraint solver that knows the delays:
CrossUD, where data passes the stages once, and CrossWave, where it goes to and fro. Here both families are searched by
the best of a set of greedy rules and annealing over the orders of all stages; `ours` also tries a V inside each site,
and cuts microbatches into sequence slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import ConfigError
from scale_across.pipeline import Pipeline, Rule, Run, anneal, greedy, run
from scale_across.schedule import Schedule, local_v_devices, wave_devices
from scale_across.schedules_static import zb_h1

SLICE_PRICE = {1: 0.0, 2: 0.03, 4: 0.08}
"""How much longer the blocks of a microbatch take in all when it is cut into so many sequence slices."""


@dataclass(frozen=True)
class Setting:
    """A pipeline over equal sites in a chain, before a family of schedules is chosen."""

    stages: int
    sites: int
    microbatches: int
    f_s: float
    d_s: float
    w_s: float
    occupied_s: float
    """Seconds that a microbatch's message keeps a link."""
    latency_s: float
    memory: int
    """Most microbatches of activations a stage may hold."""
    checkpoint: float = 1.0
    """Share of them that a forward pass leaves; the rest comes back with D (recompute), and both go with W."""

    def pipeline(self, devices: Sequence[int], slices: int = 1, price: float | None = None) -> Pipeline:
        """The work on given devices of virtual stages; memory is counted in tenths."""
        chunks = len(devices) // self.stages
        hold_f = max(1, round(10 * self.checkpoint))
        return Pipeline.uniform(
            devices, self.stages, self.microbatches, f_s=self.f_s, d_s=self.d_s, w_s=self.w_s,
            limit_units_S=[10 * self.memory * chunks * slices] * self.stages, sites=self.sites,
            occupied_s=self.occupied_s, latency_s=self.latency_s, slices=slices,
            slice_price=SLICE_PRICE[slices] if price is None else price, hold_f=hold_f, hold_d=10 - hold_f,
        )  # fmt: skip


def rules(pipeline: Pipeline) -> list[Rule]:
    """All orders of preference of F, D and W, several patiences of W and, with chunks, preferences among these."""
    unit_s = float(pipeline.duration_KV[0].max() * pipeline.slices)
    late = (0.01,) if len(pipeline.device_V) == pipeline.stages else (0.01, 0.3, -0.3, 3.0, -3.0)
    return [
        Rule(rank=(rank[0], rank[1], rank[2]), patience_s=patience * unit_s, late_first=preference)
        for rank in itertools.permutations((0.0, 1.0, 2.0))
        for patience in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
        for preference in late
    ]


def best_greedy(pipeline: Pipeline, name: str) -> Run:
    """The shortest schedule of all greedy rules (first of equals).

    Raises:
        ConfigError: the memory limit is too small for every rule.
    """
    best: Run | None = None
    for rule in rules(pipeline):
        try:
            found = greedy(pipeline, name, rule)
        except ConfigError:
            continue
        if best is None or found.makespan_s < best.makespan_s - 1e-12:
            best = found
    if best is None:
        raise ConfigError(f"{name}: no greedy rule gets through; raise the memory limit")
    return best


def cross_ud_sub(setting: Setting) -> Run:
    """Greedy, unidirectional: what CrossUDSub does, with the best of our rules."""
    return best_greedy(setting.pipeline(range(setting.stages)), "cross_ud_sub")


def improved(
    pipeline: Pipeline, name: str, proposals: int, also: Sequence[Schedule] = (), target_s: float = 0.0
) -> Run:
    """The best greedy schedule, or one of `also`, annealed; half of the proposals at each of two temperatures."""
    starts = [best_greedy(pipeline, name), *(run(schedule, pipeline) for schedule in also)]
    best = min(starts, key=lambda found: found.makespan_s)
    unit_s = float(pipeline.duration_KV[0].max() * pipeline.slices)
    for seed, heat in ((1, 0.05), (2, 0.02)):
        if proposals and best.makespan_s > target_s + 1e-9:
            best = anneal(best, pipeline, proposals=proposals // 2, heat_s=heat * unit_s, target_s=target_s, seed=seed)
    return best


def cross_ud(setting: Setting, proposals: int = 40_000, target_s: float = 0.0) -> Run:
    """The best unidirectional schedule found (CrossUD's family)."""
    also = [zb_h1(setting.stages, setting.microbatches)] if setting.memory >= setting.stages else []
    return improved(setting.pipeline(range(setting.stages)), "cross_ud", proposals, also, target_s)


def cross_wave(setting: Setting, proposals: int = 40_000, target_s: float = 0.0) -> Run:
    """The best schedule found in which data goes to and fro over all stages once (CrossWave's family)."""
    return improved(setting.pipeline(wave_devices(setting.stages, 2)), "cross_wave", proposals, (), target_s)


def ours(setting: Setting, proposals: int = 40_000, slices: Sequence[int] = (1, 2, 4)) -> dict[str, Run]:
    """Family and slices → best schedule found: unidirectional, wave, and a V inside each site."""
    families = {
        "ud": list(range(setting.stages)),
        "wave": wave_devices(setting.stages, 2),
        "local_v": local_v_devices(setting.stages, setting.sites),
    }
    found = {}
    for count, (family, devices) in itertools.product(slices, families.items()):
        also = [zb_h1(setting.stages, setting.microbatches)] if (family, count) == ("ud", 1) else []
        also = also if setting.memory >= setting.stages else []
        label = f"{family} x{count}"
        found[label] = improved(setting.pipeline(devices, count), label, proposals, also)
    return found
