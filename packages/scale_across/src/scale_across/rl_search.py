"""The best plan of an RL job over all placements and collectives, by branch and bound with a proof.

The step time is a sum of phases, each set by a part of the plan:

    learner sites, reduction → gradients; + comparison site → shards; + rollout sites → trajectories and weight sync

So a partial plan's sum plus the compute phases is a lower bound of every completion (transfers are never negative).
Partial plans are expanded in order of that bound, and a branch whose bound reaches the incumbent is dropped. What
remains when the search ends is optimal over the stated space, and the bound equals the plan's time.

The space: every count of workers per site for each role, ranks of a site consecutive, the sites in every order. Order
matters to a ring, to the relay of weights, and wherever messages of two sites queue on one link of their routes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.messages import Broadcast, Reduction, Routes
from common.spec import ClusterSpec
from scale_across.rl_job import (
    BROADCASTS,
    REDUCTIONS,
    RlJob,
    RlPlan,
    check_fits,
    gradients_s,
    hierarchical,
    price,
    production,
    shards_s,
    trajectories_s,
    weight_sync_s,
)


@dataclass(frozen=True)
class RlExploration:
    """The outcome of a search: the winner, what it was compared with, and how sure we are."""

    best: RlPlan
    baselines: tuple[RlPlan, ...]
    lower_bound_s: float
    """No plan of the space is faster. Equal to the best plan's time unless the search was cut short."""
    plans_priced: int
    branches_pruned: int
    runtime_s: float

    @property
    def gap(self) -> float:
        """(best - bound) / bound; zero is a proof of optimality."""
        return (self.best.step.total_s - self.lower_bound_s) / self.lower_bound_s

    def speedup_over(self, baseline: RlPlan) -> float:
        """T_baseline / T_best - 1."""
        return baseline.step.total_s / self.best.step.total_s - 1


def explore_rl(
    cluster: ClusterSpec,
    job: RlJob,
    *,
    time_limit_s: float = 30.0,
) -> RlExploration:
    """Search every placement and every pair of collectives; deterministic, and anytime within `time_limit_s`.

    Raises:
        ConfigError: the job has more workers than the cluster has GPUs.
    """
    check_fits(cluster, job)
    started = time.monotonic()
    routes = Routes(cluster)
    baselines = (production(routes, job), hierarchical(routes, job))
    search = _Search(routes, job, min(baselines, key=lambda plan: plan.step.total_s), started + time_limit_s)
    bound_s = search.run()
    return RlExploration(
        best=search.best,
        baselines=baselines,
        lower_bound_s=bound_s,
        plans_priced=search.priced,
        branches_pruned=search.pruned,
        runtime_s=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _LearnerBranch:
    bound_s: float
    learner: tuple[str, ...]
    reduction: Reduction


class _Search:
    """The incumbent and its counters; the space is walked learner first, because its transfers weigh most."""

    def __init__(self, routes: Routes, job: RlJob, incumbent: RlPlan, deadline_s: float) -> None:
        self.routes, self.job, self.best, self.deadline_s = routes, job, incumbent, deadline_s
        self.priced = self.pruned = 0
        profile = job.profile
        self.compute_s = profile.rollout_s + profile.comparison_s + profile.learner_s + profile.sync_s
        self.capacity = {site.name: site.gpus for site in routes.cluster.sites}
        self._sync_s: dict[tuple[str, tuple[str, ...]], tuple[float, Broadcast]] = {}
        self._trajectories_s: dict[tuple[tuple[str, ...], str], float] = {}

    def run(self) -> float:
        """Search until the optimum is proven or the time is over; returns the proven lower bound in seconds."""
        branches, complete = self.learner_branches()
        for position, branch in enumerate(branches):
            if branch.bound_s >= self.best.step.total_s:
                self.pruned += len(branches) - position
                break
            if not self.expand(branch):
                return branch.bound_s if complete else self.compute_s
        return self.best.step.total_s if complete else min(self.compute_s, self.best.step.total_s)

    def learner_branches(self) -> tuple[list[_LearnerBranch], bool]:
        """Learner placements with their cheaper reduction, cheapest bound first (ties: fewest sites, then their order).

        The second value tells whether these are all; half of the time is kept for expanding them.
        """
        branches = []
        halfway_s = (time.monotonic() + self.deadline_s) / 2
        complete = True
        for learner in ordered_placements(self.capacity, self.job.learner_ranks):
            cost_s, reduction = min(
                ((gradients_s(self.routes, self.job, learner, kind), kind) for kind in REDUCTIONS), key=lambda c: c[0]
            )
            branches.append(_LearnerBranch(self.compute_s + cost_s, learner, reduction))
            if time.monotonic() > halfway_s:
                complete = False
                break
        return sorted(branches, key=lambda branch: branch.bound_s), complete

    def expand(self, branch: _LearnerBranch) -> bool:
        """Try every comparison site and rollout placement beside one learner placement; False when time is over."""
        free = dict(self.capacity)
        for site in branch.learner:
            free[site] -= 1
        for comparison in [site for site, gpus in free.items() if gpus]:
            bound_s = branch.bound_s + shards_s(self.routes, self.job, comparison, branch.learner)
            if bound_s >= self.best.step.total_s:
                self.pruned += 1
                continue
            left = free | {comparison: free[comparison] - 1}
            for rollout in ordered_placements(left, self.job.rollout_workers):
                if time.monotonic() > self.deadline_s:
                    return False
                self._try(branch, comparison, rollout, bound_s)
        return True

    def _try(self, branch: _LearnerBranch, comparison: str, rollout: tuple[str, ...], bound_s: float) -> None:
        total_s = bound_s + self._trajectories(rollout, comparison)
        if total_s >= self.best.step.total_s:
            self.pruned += 1
            return
        sync_s, broadcast = self._sync(branch.learner[0], rollout)
        self.priced += 1
        if total_s + sync_s < self.best.step.total_s:
            self.best = price(
                self.routes, self.job, "joint", branch.learner, rollout, comparison, branch.reduction, broadcast
            )

    def _trajectories(self, rollout: tuple[str, ...], comparison: str) -> float:
        key = (rollout, comparison)
        if key not in self._trajectories_s:
            self._trajectories_s[key] = trajectories_s(self.routes, self.job, rollout, comparison)
        return self._trajectories_s[key]

    def _sync(self, learner_0: str, rollout: tuple[str, ...]) -> tuple[float, Broadcast]:
        key = (learner_0, rollout)
        if key not in self._sync_s:
            self._sync_s[key] = min(
                ((weight_sync_s(self.routes, self.job, learner_0, rollout, kind), kind) for kind in BROADCASTS),
                key=lambda c: c[0],
            )
        return self._sync_s[key]


def ordered_placements(capacity: dict[str, int], workers: int) -> Iterator[tuple[str, ...]]:
    """Every way to give `workers` to sites of the given free GPUs, grouped by site, the used sites in every order.

    Fewest sites first. A ring visits the sites in their order, and the first one leads.
    """
    for used in range(1, len(capacity) + 1):
        for sites in itertools.permutations(capacity, used):
            yield from _shared_out(sites, capacity, workers)


def _shared_out(sites: tuple[str, ...], capacity: dict[str, int], workers: int) -> Iterator[tuple[str, ...]]:
    """Every way to give `workers` to exactly these sites, at least one each, within their capacity."""
    first, rest = sites[0], sites[1:]
    if not rest:
        if 1 <= workers <= capacity[first]:
            yield (first,) * workers
        return
    for here in range(min(workers - len(rest), capacity[first]), 0, -1):
        for others in _shared_out(rest, capacity, workers - here):
            yield (first,) * here + others
