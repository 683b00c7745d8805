"""A reinforcement-learning step as a workload: which site each role sits at, and how the roles talk.

One synchronous step of Strat-Reasoner over W rollout workers, one comparison worker and L learner ranks:

    rollouts ──trajectories──► comparison ──shards──► learner ranks ──gradient all-reduce──► update
        ▲                                                                                       │
        └──────────────────────────────── weight sync ──────────────────────────────────────────┘

The phases follow one another, so the step time is the sum of the compute phases (from a short profile of the real
workers, see `RlProfile`) and of the transfers that the placement causes. Transfers are priced message by message with
the very sequence that the runtime sends (`common.messages`), over links that serve one message after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pydantic import Field

from common.config import Config, ConfigError
from common.messages import (
    Broadcast,
    Message,
    Reduction,
    Routes,
    all_reduce_messages,
    broadcast_messages,
    finish_time_s,
)
from common.spec import ClusterSpec, Placement

REDUCTIONS: tuple[Reduction, ...] = ("ring", "hierarchical")
BROADCASTS: tuple[Broadcast, ...] = ("star", "relay")


class RlProfile(Config):
    """Compute seconds and payload bytes of one step with the job's own worker counts, without any cross-site link."""

    rollout_s: float = Field(ge=0)
    """Until the slowest rollout worker has its games."""
    comparison_s: float = Field(ge=0)
    learner_s: float = Field(ge=0)
    """Forward, backward and update of one shard on the slowest rank, gradient exchange excluded."""
    sync_s: float = Field(default=0, ge=0)
    """Loading new weights on a rollout worker."""
    trajectory_bytes: int = Field(ge=0)
    """From all rollout workers together to the comparison."""
    shard_bytes: int = Field(ge=0)
    """From the comparison to all learner ranks together: the samples that enter the loss."""
    parameters: int = Field(ge=0)
    """Trained parameters: gradients and weights travel as fp32."""


class RlJob(Config):
    """The roles of an RL job. Each worker takes one GPU; the comparison is centralised, so it has one worker."""

    kind: Literal["rl"] = "rl"
    name: str = "rl"
    learner_ranks: int = Field(gt=0, le=64)
    rollout_workers: int = Field(gt=0, le=64)
    profile: RlProfile

    @property
    def gpus(self) -> int:
        """Workers over all roles."""
        return self.learner_ranks + self.rollout_workers + 1


@dataclass(frozen=True)
class RlStepTime:
    """Where a step's seconds go; see the module's picture. Zero transfers inside a site: the profile holds those."""

    rollout_s: float
    trajectories_s: float
    comparison_s: float
    shards_s: float
    learner_s: float
    gradients_s: float
    weight_sync_s: float

    @property
    def total_s(self) -> float:
        """Seconds of one step."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def network_s(self) -> float:
        """Seconds that exist only because of links between sites."""
        return self.trajectories_s + self.shards_s + self.gradients_s + self.weight_sync_s


@dataclass(frozen=True)
class RlPlan:
    """Sites of all workers in rank order, the collectives between them, and the step time predicted for both."""

    name: str
    learner: tuple[str, ...]
    rollout: tuple[str, ...]
    comparison: str
    reduction: Reduction
    weight_sync: Broadcast
    step: RlStepTime

    @property
    def placement(self) -> Placement:
        """What `common.placement.reserve` takes."""
        return Placement(roles={"learner": self.learner, "rollout": self.rollout, "comparison": (self.comparison,)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a YAML or JSON file, predicted times included."""
        return {
            "name": self.name,
            "placement": self.placement.model_dump(mode="json")["roles"],
            "reduction": self.reduction,
            "weight_sync": self.weight_sync,
            "predicted_s": {**asdict(self.step), "total_s": self.step.total_s},
        }

    def describe(self) -> str:
        """One line: role → site x count, and the collectives."""
        roles = (("learner", self.learner), ("rollout", self.rollout), ("comparison", (self.comparison,)))
        parts = [f"{role}: " + ", ".join(_counted(sites)) for role, sites in roles]
        return "; ".join([*parts, f"{self.reduction} all-reduce, {self.weight_sync} weight sync"])


def _counted(sites: Sequence[str]) -> list[str]:
    runs: list[list[str]] = []
    for site in sites:
        if runs and runs[-1][0] == site:
            runs[-1].append(site)
        else:
            runs.append([site])
    return [f"{run[0]} x{len(run)}" if len(run) > 1 else run[0] for run in runs]


# -- transfers of one step -----------------------------------------------------------------------------------------


def trajectories_s(routes: Routes, job: RlJob, rollout: Sequence[str], comparison: str) -> float:
    """All rollout workers send their games to the comparison worker at once."""
    share = job.profile.trajectory_bytes // len(rollout)
    hub = len(rollout)
    return finish_time_s(routes, [*rollout, comparison], [Message(0, rank, hub, share) for rank in range(hub)])


def shards_s(routes: Routes, job: RlJob, comparison: str, learner: Sequence[str]) -> float:
    """The comparison worker sends each learner rank its shard, with advantages."""
    share = job.profile.shard_bytes // len(learner)
    messages = [Message(0, 0, rank, share) for rank in range(1, len(learner) + 1)]
    return finish_time_s(routes, [comparison, *learner], messages)


def gradients_s(routes: Routes, job: RlJob, learner: Sequence[str], reduction: Reduction) -> float:
    """All-reduce of the fp32 gradients over the learner ranks."""
    return finish_time_s(routes, learner, all_reduce_messages(reduction, learner, job.profile.parameters))


def weight_sync_s(routes: Routes, job: RlJob, learner_0: str, rollout: Sequence[str], broadcast: Broadcast) -> float:
    """Broadcast of the fp32 weights from learner rank 0 to the rollout workers."""
    sites = [learner_0, *rollout]
    return finish_time_s(routes, sites, broadcast_messages(broadcast, sites, job.profile.parameters))


def price(
    routes: Routes,
    job: RlJob,
    name: str,
    learner: Sequence[str],
    rollout: Sequence[str],
    comparison: str,
    reduction: Reduction,
    weight_sync: Broadcast,
) -> RlPlan:
    """Predict the step time of one fully given plan.

    Raises:
        ConfigError: the placement names an unknown site or takes more GPUs than a site has.
    """
    profile = job.profile
    step = RlStepTime(
        rollout_s=profile.rollout_s,
        trajectories_s=trajectories_s(routes, job, rollout, comparison),
        comparison_s=profile.comparison_s,
        shards_s=shards_s(routes, job, comparison, learner),
        learner_s=profile.learner_s,
        gradients_s=gradients_s(routes, job, learner, reduction),
        weight_sync_s=profile.sync_s + weight_sync_s(routes, job, learner[0], rollout, weight_sync),
    )
    plan = RlPlan(name, tuple(learner), tuple(rollout), comparison, reduction, weight_sync, step)
    short = plan.placement.shortages(routes.cluster)
    if short:
        raise ConfigError(f"plan {name!r} does not fit {routes.cluster.name!r}: " + "; ".join(short))
    return plan


# -- baselines -----------------------------------------------------------------------------------------------------


def spread(cluster: ClusterSpec, job: RlJob) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Sites of (learner, rollout, comparison) when data parallelism is the outermost axis and so crosses the sites.

    Workers are dealt to the sites in turn, role by role, skipping full sites: what a scheduler that balances load and
    knows no distances does (Ray's SPREAD), and where the published production order TP, CP, PP, DP ends up.

    Raises:
        ConfigError: the job has more workers than the cluster has GPUs.
    """
    check_fits(cluster, job)
    free = {site.name: site.gpus for site in cluster.sites}
    names = list(free)
    turns = itertools.cycle(names)

    def deal(count: int) -> tuple[str, ...]:
        dealt: list[str] = []
        while len(dealt) < count:
            site = next(turns)
            if free[site]:
                free[site] -= 1
                dealt.append(site)
        return tuple(sorted(dealt, key=names.index))

    return deal(job.learner_ranks), deal(job.rollout_workers), deal(1)[0]


def check_fits(cluster: ClusterSpec, job: RlJob) -> None:
    """Raise ConfigError when the cluster has fewer GPUs than the job has workers."""
    if job.gpus > cluster.gpus:
        have = ", ".join(f"{site.name} {site.gpus}" for site in cluster.sites)
        raise ConfigError(
            f"job {job.name!r} needs {job.gpus} GPUs ({job.learner_ranks} learner ranks, {job.rollout_workers} rollout "
            f"workers, 1 comparison worker), cluster {cluster.name!r} has {cluster.gpus} ({have}): lower learner_ranks "
            "or rollout_workers, or add GPUs to a site"
        )


def production(routes: Routes, job: RlJob) -> RlPlan:
    """The production configuration: roles spread over the sites, flat ring, weights sent to each worker in turn."""
    learner, rollout, comparison = spread(routes.cluster, job)
    return price(routes, job, "production", learner, rollout, comparison, "ring", "star")


def hierarchical(routes: Routes, job: RlJob) -> RlPlan:
    """Production's placement with collectives that cross each link once (NeMo-style): network technology alone."""
    learner, rollout, comparison = spread(routes.cluster, job)
    return price(routes, job, "hierarchical", learner, rollout, comparison, "hierarchical", "relay")
