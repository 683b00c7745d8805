"""The best training plan over all sites, axes and degrees, with a lower bound over the whole space.

    found = explore(model, topology, job)
    found.best.describe(), found.gap, found.speedup_over("production")

Rows that leave ZeRO, recompute and reduction open are bounded by the compute of one stage without recompute plus a
sharded optimizer (`bound_s`), which no completion beats: each computes at least as much and adds communication. A row
whose bound reaches the incumbent is dropped with its completions; the others are priced in order of their bounds. When
nothing is left, the incumbent is optimal over the space in the estimate's model, and the bound equals its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.config import ConfigError
from scale_across.baselines import BASELINES, EXPLORER, Rules
from scale_across.estimate import TrainingJob
from scale_across.model import ModelShape
from scale_across.parallelism import Parallelism, describe
from scale_across.space import FINE, Floats, Region, Rows, Space
from scale_across.space_kernel import BOUND_S, MEMORY_BYTES, TOTAL_S, compile_kernel, price_rows
from scale_across.step import Estimate
from scale_across.topology import Topology

BATCH = 1_000
"""Rows expanded at once; each has len(FINE) completions."""

Progress = Callable[[str, float, float], None]
"""Called with (what is searched for, incumbent in s, lower bound in s)."""


@dataclass(frozen=True)
class SitePlan:
    """One plan with its placement and its predicted step."""

    name: str
    parallelism: Parallelism
    region: Region
    estimate: Estimate

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return float(self.estimate.total_s)

    def describe(self) -> str:
        """Short text: where, then how."""
        units = self.region.units(self.parallelism)
        unit = "stages" if self.region.crossing == "pp" else "replicas"
        where = ", ".join(f"{count} {unit} at {site}" for site, count in units.items())
        without = f"; without {', '.join(self.region.left_out)}" if self.region.left_out else ""
        return f"{where}{without}; {describe(self.parallelism)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and YAML."""
        return {
            "name": self.name,
            "step_s": self.step_s,
            "crossing": self.region.crossing,
            "units": self.region.units(self.parallelism),
            "left_out": list(self.region.left_out),
            "parallelism": {key: int(value) for key, value in self.parallelism._asdict().items()},
            "memory_gib": float(self.estimate.memory_bytes) / 2**30,
        }


@dataclass(frozen=True)
class Exploration:
    """The outcome of a search."""

    best: SitePlan
    baselines: tuple[SitePlan, ...]
    """Those with a plan that fits, each the best of its kind."""
    missing: tuple[str, ...]
    """Baselines without a plan that fits, or not reached in time."""
    lower_bound_s: float
    """No plan of the space is faster in the estimate's model."""
    priced: int
    pruned: dict[str, int]
    """Rule → plans dropped by it in the search for the best."""
    runtime_s: float

    @property
    def gap(self) -> float:
        """(best - bound) / bound; zero is a proof of optimality in this model."""
        return (self.best.step_s - self.lower_bound_s) / self.lower_bound_s

    def speedup_over(self, plan: SitePlan) -> float:
        """T_baseline / T_best - 1."""
        return plan.step_s / self.best.step_s - 1


def explore(
    model: ModelShape,
    topology: Topology,
    job: TrainingJob,
    *,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
) -> Exploration:
    """Search the whole space; deterministic unless the limit or Ctrl-C cuts it short: then the best plan so far.

    The limit counts from when the estimate is compiled, and bounding and the first plan that fits are always done.

    Raises:
        ConfigError: no plan was found that fits the GPUs' memory.
    """
    space = Space.of(model, topology, job)
    compile_kernel(next(space.regions()).setup)
    started = time.monotonic()
    search = _Search(space, started + time_limit_s, progress)
    try:
        search.prepare()
        search.run(EXPLORER)
        for rules in BASELINES:
            search.run(rules)
    except KeyboardInterrupt:
        pass
    return search.result(time.monotonic() - started)


@dataclass
class _Chunk:
    """Rows of one region in order of their bounds."""

    region: Region
    rows: Rows
    bound_N: Floats


@dataclass
class _Search:
    space: Space
    deadline: float
    progress: Progress | None
    chunks: list[_Chunk] = field(default_factory=list)
    incumbents: dict[str, SitePlan] = field(default_factory=dict)
    bounds_s: dict[str, float] = field(default_factory=dict)
    priced: int = 0
    pruned: dict[str, int] = field(default_factory=lambda: {"bound": 0, "memory": 0})

    def prepare(self) -> None:
        """Bound every relaxed row, and put them into chunks by ascending bound."""
        for region in self.space.regions():
            rows = region.relaxed()
            bound_N = price_rows(region.setup, rows)[:, BOUND_S]
            order = np.argsort(bound_N, kind="stable")
            for start in range(0, len(order), BATCH):
                part = order[start : start + BATCH]
                self.chunks.append(_Chunk(region, rows.take(part), bound_N[part]))
        self.chunks.sort(key=lambda chunk: float(chunk.bound_N[0]))

    def run(self, rules: Rules) -> None:
        """The fastest plan that keeps the rules; its lower bound holds wherever the search stops."""
        best_s = math.inf
        for index, chunk in enumerate(self.chunks):
            self.bounds_s[rules.name] = min(best_s, float(chunk.bound_N[0]))
            if self.progress:
                self.progress(rules.name, best_s, self.bounds_s[rules.name])
            if chunk.bound_N[0] >= best_s:
                if rules is EXPLORER:
                    self.pruned["bound"] += sum(len(rest.rows) for rest in self.chunks[index:]) * len(FINE)
                break
            if time.monotonic() > self.deadline and (rules is not EXPLORER or best_s < math.inf):
                return
            if rules.takes(chunk.region):
                best_s = self._expand(rules, chunk, best_s)
        self.bounds_s[rules.name] = best_s

    def _expand(self, rules: Rules, chunk: _Chunk, best_s: float) -> float:
        """Price the completions of a chunk that can still win; return the incumbent's seconds."""
        open_N = chunk.bound_N < best_s
        rows = chunk.rows.take(np.flatnonzero(open_N)).expand()
        rows = rows.take(np.flatnonzero(rules.keeps(rows.plans_NF, rows.batch_N, self.space.job.global_batch)))
        if not len(rows):
            return best_s
        priced_NF = price_rows(chunk.region.setup, rows)
        fits_N = priced_NF[:, MEMORY_BYTES] <= chunk.region.setup.gpu.memory_bytes
        self.priced += len(rows)
        if rules is EXPLORER:
            self.pruned["bound"] += int((~open_N).sum()) * len(FINE)
            self.pruned["memory"] += int((~fits_N).sum())
        seconds_N = np.where(fits_N, priced_NF[:, TOTAL_S], math.inf)
        index = int(np.argmin(seconds_N))
        if not seconds_N[index] < best_s:
            return best_s
        plan = Parallelism(*(int(value) for value in rows.plans_NF[index]))
        self.incumbents[rules.name] = SitePlan(rules.name, plan, chunk.region, chunk.region.estimate(plan))
        return float(seconds_N[index])

    def result(self, runtime_s: float) -> Exploration:
        """What was found until now."""
        found = [self.incumbents[rules.name] for rules in BASELINES if rules.name in self.incumbents]
        everything = [*self.incumbents.values()]
        if not everything:
            why = f"{self.pruned['memory']} of {self.priced} priced plans exceed the GPUs' memory"
            raise ConfigError(f"no plan for {self.space.model.name} found: {why}; add GPUs or shorten seq_len")
        best = min(everything, key=lambda plan: plan.step_s)
        return Exploration(
            best=SitePlan(EXPLORER.name, best.parallelism, best.region, best.estimate),
            baselines=tuple(found),
            missing=tuple(rules.name for rules in BASELINES if rules.name not in self.incumbents),
            lower_bound_s=min(best.step_s, self.bounds_s[EXPLORER.name]),
            priced=self.priced,
            pruned=self.pruned,
            runtime_s=runtime_s,
        )
