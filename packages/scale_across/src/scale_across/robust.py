"""How a plan fares when the cluster is worse than believed, and the plan that fares best then.

    derated(cluster, Box(bandwidth=0.5))
    losses(judged)

A step is never faster with less bandwidth, more latency or slower GPUs, so over a box of such errors the worst case is
its worst corner; the plan that is best there is the one that minimises the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from common.config import Config
from common.spec import ClusterSpec
from scale_across.estimate import TrainingJob
from scale_across.judge import Judged, judge
from scale_across.plan_file import PlanFile


class Box(Config):
    """Factors on what is believed of the links between sites and of the GPUs; the worst corner of a box of errors."""

    bandwidth: float = Field(default=1.0, gt=0, le=1)
    latency: float = Field(default=1.0, ge=1)
    compute: float = Field(default=1.0, gt=0, le=1)


CASES = tuple(
    (name, error, Box.model_validate({name: 1.0 + error if name == "latency" else 1.0 - error}))
    for name in ("bandwidth", "latency", "compute")
    for error in (0.1, 0.25, 0.5)
)
"""(what is off, by how much, the box)."""


@dataclass(frozen=True)
class Loss:
    """A step under one error."""

    name: str
    error: float
    step_s: float
    slower: float
    """T / T_believed - 1."""


def derated(cluster: ClusterSpec, box: Box) -> ClusterSpec:
    """The cluster with slower, longer links; compute is a matter of the job, see `slowed`."""
    links = tuple(
        link.model_copy(
            update={
                "bandwidth_gbps": link.bandwidth_gbps * box.bandwidth,
                "latency_us": link.latency_us * box.latency,
            }
        )
        for link in cluster.links
    )
    return cluster.model_copy(update={"links": links})


def slowed(job: TrainingJob, box: Box) -> TrainingJob:
    """The job on GPUs that compute and read memory at a share of their calibrated rates."""
    return job.model_copy(update={"compute_share": job.compute_share * box.compute})


def losses(judged: Judged) -> tuple[Loss, ...]:
    """The same plan simulated under each of CASES."""
    plan = PlanFile.of(judged.choice)
    found = []
    for name, error, box in CASES:
        worse = plan.model_copy(update={"cluster": derated(plan.cluster, box), "job": slowed(plan.job, box)})
        again = judge(worse.choice())
        if again is not None:
            found.append(Loss(name, error, again.step_s, again.step_s / judged.step_s - 1))
    return tuple(found)
