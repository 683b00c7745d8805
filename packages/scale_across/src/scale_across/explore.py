"""The best training plan over placement, schedule and network technology, with a lower bound over the whole space.

    found = explore(model, topology, job)
    found.best.describe(), found.gap, found.speedup_over("production")

Best-first branch and bound. A node of the tree is a region of the space, a batch of rows that leave something open, or
one whole plan; each has a lower bound that no plan below it beats (`Region.least_s`, `lower_bound.py`). The node with
the least bound is taken next: a region is enumerated, rows are refined, a plan is simulated (`judge.py`). When the
least bound reaches the fastest plan simulated so far, that plan is optimal over the space in the simulation's model;
stopped before, the least bound still bounds the whole space.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from common.config import ConfigError
from scale_across.baselines import BASELINES, EXPLORER, Rules
from scale_across.estimate import TrainingJob
from scale_across.families import FAMILIES
from scale_across.judge import Choice, Judged, choice_of, judge
from scale_across.model import ModelShape
from scale_across.space import MAX_CHUNKS, MICROBATCHES, Floats, Region, Rows, Space
from scale_across.space_kernel import BOUND_S, MEMORY_SHARE, bound_rows, compile_kernel, with_shares
from scale_across.topology import Topology

BATCH = 1_000
"""Rows that are refined at once."""
DIVE = 8
"""Promising plans of a batch that are simulated before the others."""

Progress = Callable[[str, float, float], None]
"""Called with (what is searched for, incumbent in s, lower bound in s)."""


@dataclass(frozen=True)
class SitePlan:
    """The winner of a search."""

    name: str
    judged: Judged

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.judged.step_s

    @property
    def choice(self) -> Choice:
        """Placement, schedule and technology."""
        return self.judged.choice

    def describe(self) -> str:
        """Short text: where, then how."""
        return self.choice.describe()


@dataclass(frozen=True)
class Exploration:
    """The outcome of a search."""

    best: SitePlan
    baselines: tuple[SitePlan, ...]
    """Those with a plan that fits, each the best of its kind."""
    missing: tuple[str, ...]
    """Baselines without a plan that fits, or not reached in time."""
    lower_bound_s: float
    """No plan of the space is faster in the simulation's model."""
    baseline_gaps: dict[str, float]
    """How much faster a baseline's own best could be than the plan found for it; 0 where its search ended."""
    simulated: tuple[Judged, ...]
    """Every plan that was simulated, fastest first."""
    bounded: int
    """Rows whose bound was computed."""
    pruned: dict[str, int]
    """Rule → rows dropped by it in the search for the best; regions count as one."""
    runtime_s: float

    @property
    def gap(self) -> float:
        """(best - bound) / bound; zero is a proof of optimality in this model."""
        return (self.best.step_s - self.lower_bound_s) / self.lower_bound_s

    def baseline(self, name: str) -> SitePlan | None:
        """The plan of a baseline, None when it has none."""
        return next((plan for plan in self.baselines if plan.name == name), None)

    def speedup_over(self, plan: SitePlan) -> float:
        """T_baseline / T_best - 1."""
        return plan.step_s / self.best.step_s - 1

    def runners_up(self, count: int = 5) -> tuple[Judged, ...]:
        """The fastest simulated plans that differ from the best, and from each other, in kind.

        A kind is a set of sites, the axis that crosses them and a schedule. Plans whose bound was above the best are
        never simulated, so a kind that is missing here is slower than the best, but how much is not known.
        """
        kinds = {_kind(self.best.judged)}
        found = []
        for one in self.simulated:
            if _kind(one) not in kinds:
                kinds.add(_kind(one))
                found.append(one)
        return tuple(found[:count])

    def pareto(self) -> tuple[Judged, ...]:
        """Simulated plans that no other one beats in step time, memory, bytes between sites and GPU-seconds at once."""
        front: list[Judged] = []
        seen: list[tuple[float, ...]] = []
        for one in self.simulated:  # fastest first, so only earlier ones can beat it
            costs = (one.memory_bytes, one.cross_site_bytes, one.gpu_s)
            if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other in seen):
                front.append(one)
                seen.append(costs)
        return tuple(front)


def _kind(judged: Judged) -> tuple[object, ...]:
    choice = judged.choice
    return frozenset(choice.region.sites), choice.region.crossing, choice.schedule.split("_x")[0]


def explore(
    model: ModelShape,
    topology: Topology,
    job: TrainingJob,
    *,
    time_limit_s: float = math.inf,
    tolerance: float = 0.0,
    most_simulated: int | None = None,
    microbatches: tuple[int, ...] = MICROBATCHES,
    max_chunks: int = MAX_CHUNKS,
    rules: tuple[Rules, ...] = BASELINES,
    progress: Progress | None = None,
) -> Exploration:
    """Search the whole space, then each baseline's part; deterministic unless the limit or Ctrl-C cuts it short.

    Args:
        time_limit_s: counted from when the bounds are compiled; a first plan that fits is always looked for. Half of it
            is for the best plan, the rest for the baselines.
        tolerance: a search ends when it is proven that no plan is faster by more than this share.
        most_simulated: plans that each search simulates at most; where it ends does not depend on the machine's speed.
        microbatches: sequences per microbatch to choose from.
        max_chunks: model chunks per stage at most.
        rules: baselines to search besides.

    Raises:
        ConfigError: no plan was found that fits the GPUs' memory.
    """
    space = Space.of(model, topology, job, microbatches, max_chunks)
    compile_kernel(next(space.regions()).setup)
    started = time.monotonic()
    search = _Search(space, tolerance, most_simulated, progress)
    try:
        search.run(EXPLORER, started + time_limit_s / 2)
        for index, one in enumerate(rules):
            left_s = started + time_limit_s - time.monotonic()
            search.run(one, time.monotonic() + left_s / (len(rules) - index))
    except KeyboardInterrupt:
        pass
    return search.result(rules, time.monotonic() - started)


@dataclass(frozen=True)
class _Node:
    """Rows of one region that leave equally much open, with their bounds, least first; no rows: all of the region."""

    region: Region
    rows: Rows | None = None
    bound_N: Floats | None = None


@dataclass
class _Search:
    space: Space
    tolerance: float
    most_simulated: int | None
    progress: Progress | None
    regions: list[Region] = field(default_factory=list)
    relaxed: dict[tuple[int, tuple[str, ...]], tuple[Rows, Floats]] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    """Region's number → its most relaxed rows."""
    judged: dict[tuple[object, ...], Judged | None] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    """Schedule → simulated step over its bound, a running mean."""
    incumbents: dict[str, Judged] = field(default_factory=dict)
    bounds_s: dict[str, float] = field(default_factory=dict)
    bounded: int = 0
    simulated_before: int = 0
    """Plans simulated by earlier searches."""
    pruned: dict[str, int] = field(default_factory=lambda: {"bound": 0, "memory": 0})

    def run(self, rules: Rules, deadline: float) -> None:
        """The fastest plan that keeps the rules; its lower bound holds wherever the search stops."""
        self.regions = self.regions or list(self.space.regions())
        order = count()
        heap: list[tuple[float, int, _Node]] = [
            (region.least_s, next(order), _Node(region)) for region in self.regions if rules.takes(region)
        ]
        heapq.heapify(heap)
        self._with_better_links(rules)
        best_s = self._known(rules)
        self.simulated_before = len(self.judged)
        while heap:
            least_s, _, node = heap[0]
            self.bounds_s[rules.name] = min(best_s, least_s)
            if self.progress:
                self.progress(rules.name, best_s, self.bounds_s[rules.name])
            if least_s >= best_s * (1 - self.tolerance):
                break
            if (time.monotonic() > deadline or self._enough()) and (best_s < math.inf or rules is not EXPLORER):
                return
            heapq.heappop(heap)
            if node.rows is not None and node.rows.family_N[0] >= 0:
                best_s, rest = self._simulate(rules, node, best_s, deadline)
                if rest is not None and rest.bound_N is not None:
                    heapq.heappush(heap, (float(rest.bound_N[0]), next(order), rest))
            else:
                for made in self._refined(rules, node, best_s):
                    assert made.bound_N is not None
                    heapq.heappush(heap, (float(made.bound_N[0]), next(order), made))
        if rules is EXPLORER:
            self.pruned["bound"] += sum(1 if node.rows is None else len(node.rows) for _, _, node in heap)
        if not heap:
            self.bounds_s[rules.name] = best_s

    def _enough(self) -> bool:
        return self.most_simulated is not None and len(self.judged) - self.simulated_before >= self.most_simulated

    def _known(self, rules: Rules) -> float:
        """The fastest plan of earlier searches that keeps these rules, so that nothing slower is simulated."""
        best_s = math.inf
        for found in self.judged.values():
            if found is not None and found.step_s < best_s and self._belongs(rules, found.choice):
                best_s = found.step_s
                self.incumbents[rules.name] = found
        return best_s

    def _with_better_links(self, rules: Rules) -> None:
        """Try the best plan of a search with fewer technologies over the links that these rules allow."""
        fewer = [
            found for found in self.incumbents.values()
            if set(found.choice.technologies) < set(rules.technologies)
            and self._belongs(rules, replace(found.choice, technologies=rules.technologies))
        ]  # fmt: skip
        if fewer:
            best = min(fewer, key=lambda found: found.step_s)
            self._judged(replace(best.choice, technologies=rules.technologies))

    def _belongs(self, rules: Rules, choice: Choice) -> bool:
        if not rules.takes(choice.region) or choice.technologies != rules.technologies:
            return False
        plan = choice.parallelism
        batch_K = np.array(choice.microbatches, np.float64) * plan.dp * plan.microbatch
        family = next(index for index, one in enumerate(FAMILIES) if one.name == choice.schedule)
        zeros = np.zeros(1, np.int64)
        row = Rows(np.array([plan], np.int64), batch_K[None], zeros, zeros + family)
        return bool(rules.keeps(row, self.space.job.global_batch)[0])

    def _refined(self, rules: Rules, node: _Node, best_s: float) -> list[_Node]:
        """The node's rows with one more thing decided, those that can still win, in batches by their bounds."""
        region = node.region
        if node.rows is None:
            rows, bound_N = self._relaxed(region, rules)
        else:
            assert node.bound_N is not None
            rows = node.rows.take(np.flatnonzero(node.bound_N < best_s))
            rows = region.shardings(rows) if rows.family_N[0] == -2 else region.schedules(rows)
            rows = rows.take(np.flatnonzero(rules.keeps(rows, self.space.job.global_batch)))
            priced_NF = bound_rows(region, rows, rules.technologies)
            self.bounded += len(rows)
            bound_N = priced_NF[:, BOUND_S]
            if len(rows) and rows.family_N[0] >= 0:
                fits_N = priced_NF[:, MEMORY_SHARE] <= 1.0
                if rules is EXPLORER:
                    self.pruned["memory"] += int((~fits_N).sum())
                bound_N = np.where(fits_N, bound_N, math.inf)
        alive = np.flatnonzero((bound_N < best_s) & rules.keeps(rows, self.space.job.global_batch))
        if rules is EXPLORER:
            self.pruned["bound"] += int((bound_N >= best_s).sum()) - int(np.isinf(bound_N).sum())
        alive = alive[np.argsort(bound_N[alive], kind="stable")]
        parts = [alive[start : start + BATCH] for start in range(0, len(alive), BATCH)]
        return [_Node(region, rows.take(part), bound_N[part]) for part in parts]

    def _relaxed(self, region: Region, rules: Rules) -> tuple[Rows, Floats]:
        """The region's most relaxed rows and their bounds; the same for all rules with the same technologies."""
        key = (self.regions.index(region), rules.technologies)
        if key not in self.relaxed:
            if key[0] not in self.rows:
                self.rows[key[0]] = with_shares(region, region.relaxed(), rules.technologies)
            rows = self.rows[key[0]]
            priced_NF = bound_rows(region, rows, rules.technologies)
            self.bounded += len(rows)
            self.relaxed[key] = rows, priced_NF[:, BOUND_S]
        return self.relaxed[key]

    def _simulate(self, rules: Rules, node: _Node, best_s: float, deadline: float) -> tuple[float, _Node | None]:
        """Simulate whole plans in the order of their bounds; (incumbent in s, what the deadline left)."""
        assert node.rows is not None
        assert node.bound_N is not None
        in_order = range(len(node.rows))
        for index in (*self._promising(node), *in_order):
            if node.bound_N[index] >= best_s * (1 - self.tolerance):
                continue
            if (time.monotonic() > deadline or self._enough()) and best_s < math.inf:
                return best_s, node
            choice = choice_of(node.region, node.rows, index, rules.technologies)
            found = self._judged(choice)
            if found is None:
                continue
            ratio = self.ratios.get(choice.schedule, 1.0)
            self.ratios[choice.schedule] = 0.8 * ratio + 0.2 * found.step_s / float(node.bound_N[index])
            if found.step_s < best_s:
                best_s = found.step_s
                self.incumbents[rules.name] = found
                if self.progress:
                    self.progress(rules.name, best_s, min(best_s, self.bounds_s[rules.name]))
        return best_s, None

    def _promising(self, node: _Node) -> list[int]:
        """A few rows that look fastest when bounds are scaled by how far simulations were above them.

        They are simulated first: a good plan early prunes more, and where a search is cut short it is what remains.
        """
        assert node.rows is not None
        assert node.bound_N is not None
        ratio_C = np.array([self.ratios.get(family.name, 1.0) for family in FAMILIES])
        likely = np.argsort(node.bound_N * ratio_C[node.rows.family_N], kind="stable")
        return [int(index) for index in likely[:DIVE]]

    def _judged(self, choice: Choice) -> Judged | None:
        key = (self.regions.index(choice.region), *choice.key)
        if key not in self.judged:
            self.judged[key] = judge(choice)
        return self.judged[key]

    def result(self, rules: tuple[Rules, ...], runtime_s: float) -> Exploration:
        """What was found until now."""
        if not self.incumbents:
            why = f"{self.pruned['memory']} of {self.bounded} rows exceed the GPUs' memory"
            raise ConfigError(f"no plan for {self.space.model.name} found: {why}; add GPUs or shorten seq_len")
        best = min(self.incumbents.values(), key=lambda found: found.step_s)
        named = {one.name: self.incumbents[one.name] for one in rules if one.name in self.incumbents}
        return Exploration(
            best=SitePlan(EXPLORER.name, best),
            baselines=tuple(SitePlan(name, found) for name, found in named.items()),
            missing=tuple(one.name for one in rules if one.name not in named),
            lower_bound_s=min(best.step_s, self.bounds_s[EXPLORER.name]),
            baseline_gaps={name: found.step_s / self.bounds_s.get(name, 0.0) - 1 for name, found in named.items()},
            simulated=tuple(sorted((one for one in self.judged.values() if one), key=lambda one: one.step_s)),
            bounded=self.bounded,
            pruned=self.pruned,
            runtime_s=runtime_s,
        )
