"""Plans as files: enough to simulate a plan again, on its own cluster or on another."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from common.config import Config, ConfigError
from common.spec import ClusterSpec
from scale_across.crossing import TECHNOLOGIES
from scale_across.estimate import TrainingJob
from scale_across.families import BY_NAME
from scale_across.judge import Choice, Judged, judge
from scale_across.model_presets import load_model
from scale_across.parallelism import ORDER, Parallelism, from_mapping
from scale_across.space import Region, Space
from scale_across.topology import Topology


class PlanFile(Config):
    """A plan with the cluster and the job that it was made for."""

    cluster: ClusterSpec
    job: TrainingJob
    sites: tuple[str, ...]
    """Those that are used."""
    crossing: str = Field(pattern="^(dp|pp|none)$")
    """The axis that crosses sites."""
    parallelism: dict[str, int | str]
    schedule: str = "1f1b"
    technologies: tuple[str, ...] = tuple(TECHNOLOGIES)
    """Allowed on the links between sites; the best is taken."""
    microbatches: tuple[int, ...] = ()
    """Of a replica, by kind of GPU in alphabetical order; missing: the batch in equal shares."""

    @classmethod
    def of(cls, choice: Choice) -> PlanFile:
        """From a point of the space."""
        space = choice.region.space
        return cls(
            cluster=space.topology.spec,
            job=space.job,
            sites=choice.region.sites,
            crossing=choice.region.crossing,
            parallelism=dict(choice.parallelism._asdict()),
            schedule=choice.schedule,
            technologies=choice.technologies,
            microbatches=choice.microbatches,
        )

    def choice(self) -> Choice:
        """Back to a point of the space.

        Raises:
            ConfigError: no such sites, schedule or technology, or a plan that does not fit the sites.
        """
        _known("schedule", self.schedule, BY_NAME)
        for name in self.technologies:
            _known("technologies", name, TECHNOLOGIES)
        plan = from_mapping(dict(self.parallelism))
        space = Space.of(load_model(self.job.model), Topology.from_cluster(self.cluster), self.job)
        for region in space.regions():
            if set(region.sites) == set(self.sites) and region.crossing == self.crossing and region.order == plan.order:
                region.check(plan, self.schedule)
                shares = self.microbatches or (region.count(plan),) * len(region.kinds)
                self._check_shares(shares, region, plan)
                return Choice(region, plan, self.schedule, self.technologies, shares)
        raise ConfigError(
            f"sites {list(self.sites)} with {self.crossing} crossing (order {plan.order}): no such region; sites are "
            f"{', '.join(site.name for site in self.cluster.sites)}; the outermost axis (order) is one of {ORDER}"
        )

    def _check_shares(self, shares: tuple[int, ...], region: Region, plan: Parallelism) -> None:
        if len(shares) != len(region.kinds):
            raise ConfigError(
                f"microbatches {list(shares)}: one number for each of {', '.join(region.kinds)} is needed"
            )
        done = sum(a * b for a, b in zip(shares, region.replicas_of_kind(plan), strict=True)) * plan.microbatch
        if done < self.job.global_batch:
            raise ConfigError(
                f"microbatches {list(shares)}: {done} sequences in all; the batch has {self.job.global_batch}"
            )

    def judged(self) -> Judged:
        """Simulated.

        Raises:
            ConfigError: as `choice`, or it does not fit the GPUs' memory.
        """
        found = judge(self.choice())
        if found is None:
            raise ConfigError(f"plan {describe(self)}: it does not fit the GPUs' memory")
        return found


def describe(plan: PlanFile) -> str:
    """Short text."""
    return f"{plan.schedule} over {', '.join(plan.sites)}"


def to_dict(name: str, judged: Judged) -> dict[str, Any]:
    """What was found, as plain data."""
    choice = judged.choice
    return {
        "name": name,
        "step_s": judged.step_s,
        "sites": list(choice.sites),
        "left_out": list(choice.region.left_out),
        "crossing": choice.region.crossing,
        "units": choice.region.units(choice.parallelism),
        "parallelism": {key: int(value) for key, value in choice.parallelism._asdict().items()},
        "schedule": choice.schedule,
        "technology": choice.technology,
        "memory_gib": judged.memory_bytes / 2**30,
        "cross_site_gib": judged.cross_site_bytes / 2**30,
        "gpu_s": judged.gpu_s,
        "parts_s": {key: float(value) for key, value in judged.parts.items()},
    }


def _known(key: str, value: str, known: dict[str, Any]) -> None:
    if value not in known:
        raise ConfigError(f"{key}: {value!r} is unknown; known are {', '.join(known)}")
