"""The time of one whole plan by event simulation: placement, schedule and network technology together.

When DP crosses sites, every pipeline lies inside a site and the busiest stands for all; its reductions go over the
links. When PP crosses, every hop has the bandwidth and latency of the links between its two sites, and a schedule made
for links knows the slowest of them and the memory that is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from scale_across.estimate import Setup
from scale_across.families import BY_NAME, FAMILIES, Links, ScheduleFamily, build, build_for_links
from scale_across.memory import FRAGMENTATION
from scale_across.parallelism import Parallelism, describe
from scale_across.schedule import Schedule, peak_memory
from scale_across.simulate import StepTimeline, simulate
from scale_across.simulate_input import StageSites, layer_time, policy_of, work_of
from scale_across.simulate_tables import Work
from scale_across.space import Region, Rows
from scale_across.step import estimate_layers


@dataclass(frozen=True)
class Choice:
    """One point of the space."""

    region: Region
    parallelism: Parallelism
    schedule: str
    """A key of families.BY_NAME."""
    technologies: tuple[str, ...]
    """Of the links between sites, those that are allowed; the best is taken (`crossing.py`)."""
    microbatches: tuple[int, ...]
    """Of a replica, by kind of GPU (`Region.kinds`)."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others of its region."""
        return self.parallelism, self.schedule, self.technologies, self.microbatches

    @property
    def technology(self) -> str:
        """The one that is taken; empty when nothing crosses sites."""
        region = self.region
        return (
            region.crossing_of(region.layout(self.parallelism), self.technologies).technology if self.sites[1:] else ""
        )

    @property
    def sites(self) -> tuple[str, ...]:
        """In the order in which the plan passes them."""
        region = self.region
        if region.crossing == "none":
            return region.sites
        return region.crossing_of(region.layout(self.parallelism), self.technologies).sites

    def describe(self) -> str:
        """Short text: where, then how."""
        units = self.region.units(self.parallelism)
        unit = "stages" if self.region.crossing == "pp" else "replicas"
        where = ", ".join(f"{units[site]} {unit} at {site}" for site in self.sites)
        without = f"; without {', '.join(self.region.left_out)}" if self.region.left_out else ""
        schedule = f"; {self.schedule}" if self.parallelism.pp > 1 else ""
        if len(set(self.microbatches)) > 1:
            each = zip(self.microbatches, self.region.kinds, strict=True)
            schedule += "; " + ", ".join(f"{count} microbatches on {kind}" for count, kind in each)
        technology = f"; {self.technology}" if self.technology else ""
        return f"{where}{without}; {describe(self.parallelism)}{schedule}{technology}"


@dataclass(frozen=True)
class Judged:
    """A choice with its simulated step."""

    choice: Choice
    step_s: float
    schedule: Schedule
    work: Work
    memory_bytes: float
    """Of the fullest GPU."""
    parts: dict[str, float]
    """Seconds of the step by what the busiest stage does or waits for; see `StepTimeline.parts`."""

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a step: the GPUs in use times the step."""
        return self.choice.parallelism.gpus * self.step_s

    @property
    def cross_site_bytes(self) -> float:
        """Sent between sites in a step, all links together.

        Pipelines: every message, once per hop. Data parallelism: a ring over n sites carries (n - 1) times the vector
        per phase (reduce-scatter or all-gather), however it is laid out inside the sites.
        """
        choice, plan = self.choice, self.choice.parallelism
        region, sites = choice.region, len(choice.sites)
        setup = region.setup_for(plan, choice.technologies, max(choice.microbatches))
        if region.crossing == "pp":
            layout, virtual_V = stage_sites(choice), self.schedule.device_of_virtual_V
            assert layout is not None
            at = [layout.site_S[stage] for stage in virtual_V]
            crossings = sum(a != b for a, b in itertools.pairwise(at))
            tokens = setup.job.global_batch * setup.job.seq
            return 2.0 * crossings * tokens * setup.model_numbers.hidden * 2.0
        if region.crossing == "none":
            return 0.0
        params = float(region.space.model.parameters)
        microbatches = setup.job.global_batch / (plan.dp * plan.microbatch)
        phases = params * (setup.stack.reduce_bytes * 2.0)
        if plan.zero == 1:
            phases = params * (setup.stack.reduce_bytes + setup.job.parameter_bytes)
        if plan.zero == 3:
            inside = plan.shard > 0
            gathered = 0.0 if inside else 2.0 * setup.job.parameter_bytes
            phases = microbatches * params * (gathered + setup.stack.reduce_bytes * (2.0 if inside else 1.0))
        return (sites - 1) * phases

    def timeline(self) -> StepTimeline:
        """Simulated again, with all times."""
        return simulate(self.schedule, self.work, policy_of(self.choice.region.setup, self.choice.parallelism))


def choice_of(region: Region, rows: Rows, index: int, technologies: tuple[str, ...]) -> Choice:
    """A row as a point of the space."""
    plan = Parallelism(*(int(value) for value in rows.plans_NF[index]))
    shares = tuple(int(count) for count in rows.microbatches_NK[index])
    return Choice(region, plan, FAMILIES[rows.family_N[index]].name, technologies, shares)


def judge(choice: Choice) -> Judged | None:
    """Simulate one step; None when no schedule of the family fits the memory.

    A plan that computes a batch that its replicas do not divide is simulated with the busiest replica's microbatches;
    with several kinds of GPUs, each kind's replicas are simulated alone and the slowest stand for all.
    """
    found = [_judge_kind(choice, kind) for kind in range(len(choice.region.kinds))]
    whole = [one for one in found if one is not None]
    return max(whole, key=lambda one: one.step_s) if len(whole) == len(found) else None


def _judge_kind(choice: Choice, kind: int) -> Judged | None:
    """The step as the replicas on one kind of GPU see it."""
    plan, region, family = choice.parallelism, choice.region, BY_NAME[choice.schedule]
    microbatches = choice.microbatches[kind]
    setup = region.setup_for(plan, choice.technologies, microbatches, kind)
    memory = _Memory.of(setup, plan)
    sites = stage_sites(choice)
    work = work_of(setup, plan, family.last_stage(plan.pp, sites), sites, family.slices, family.price)
    policy = policy_of(setup, plan)
    schedule = _schedule(family, plan, microbatches, work, memory, sites, policy.send_exposed)
    if schedule is None:
        return None
    held = memory.with_activations(float(peak_memory(schedule).max())) if plan.pp > 1 else memory.all_bytes
    if held > setup.gpu.memory_bytes:
        return None
    timeline = simulate(schedule, work, policy)
    return Judged(choice, timeline.step_s, schedule, work, held, timeline.parts())


@dataclass(frozen=True)
class _Memory:
    """Bytes of the fullest GPU, apart from and with what schedules differ in."""

    all_bytes: float
    """With the activations of 1F1B."""
    fixed_bytes: float
    """Without activations."""
    microbatch_bytes: float
    """Activations of one microbatch on one stage."""
    room_bytes: float
    """What the GPU has for activations."""

    @classmethod
    def of(cls, setup: Setup, plan: Parallelism) -> _Memory:
        layer = layer_time(setup, plan)
        estimate = estimate_layers(plan, layer, setup.model_numbers, setup.gpu, setup.stack, setup.tiers_TF, setup.job)
        slots = plan.pp * plan.chunks
        layers = -(-setup.model_numbers.layers // slots) * plan.chunks
        fixed = float(estimate.memory_bytes - estimate.activations_bytes)
        each = layers * layer.activation_bytes * (1.0 + FRAGMENTATION)
        return cls(float(estimate.memory_bytes), fixed, float(each), setup.gpu.memory_bytes - fixed)

    def with_activations(self, microbatches: float) -> float:
        """Bytes when a stage holds so many microbatches."""
        return self.fixed_bytes + microbatches * self.microbatch_bytes


def stage_sites(choice: Choice) -> StageSites | None:
    """Who sits where when the pipeline crosses sites, with what each hop gets."""
    region = choice.region
    if region.crossing != "pp":
        return None
    crossing = region.crossing_of(region.layout(choice.parallelism), choice.technologies)
    units = region.units(choice.parallelism)
    number = {site: index for index, site in enumerate(crossing.sites)}
    site_S = tuple(number[site] for site in crossing.sites for _ in range(units[site]))
    return StageSites(site_S, {(number[a], number[b]): hop for (a, b), hop in crossing.hops.items()})


def _schedule(
    family: ScheduleFamily,
    plan: Parallelism,
    microbatches: int,
    work: Work,
    memory: _Memory,
    sites: StageSites | None,
    exposed: float,
) -> Schedule | None:
    if family.place != "across":
        return build(family.name, plan.pp, plan.chunks, microbatches)
    assert sites is not None
    neighbours = [(a, a + 1) for a in range(plan.pp - 1) if sites.site_S[a] != sites.site_S[a + 1]]
    hops = [*neighbours, *((b, a) for a, b in neighbours)]
    links = Links(
        sites.site_S,
        occupied_s=max(float(work.occupied_s_SS[hop]) for hop in hops) * family.slices,
        latency_s=max(float(work.latency_s_SS[hop]) for hop in hops),
        limit=min(int(memory.room_bytes / memory.microbatch_bytes), microbatches),
        exposed=exposed,
        inside_s=max(
            (
                float(work.occupied_s_SS[a, a + 1] + work.latency_s_SS[a, a + 1])
                for a in range(plan.pp - 1)
                if sites.site_S[a] == sites.site_S[a + 1]
            ),
            default=0.0,
        ),
    )
    return build_for_links(family, microbatches, work.duration_KV, links)
