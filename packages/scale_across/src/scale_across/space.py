"""The space of training plans over sites: which sites, which axis crosses them, how many replicas or stages at each.

    space = Space.of(model, topology, job)
    for region in space.regions():          # one choice of sites and of the axis that crosses them
        rows = region.relaxed()             # degrees, microbatch, chunks, experts
        region.shardings(rows)              # ZeRO and reduction too
        region.schedules(rows)              # recompute and the schedule too: whole plans

Of a choice of sites each hosts whole replicas (DP crosses) or whole stages (PP crosses), as many as it has room for, so
unequal sites get unequal shares, and a site may be left out. Replicas that do not divide the batch get one microbatch
more or less. Limits of the space: TP stays inside a node; all GPUs of a plan run at the pace of its slowest kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.collectives import HIERARCHICAL, RING
from scale_across.crossing import Crossing, Crossings
from scale_across.estimate import Setup, TrainingJob, cluster_tiers, slowed
from scale_across.families import FAMILIES, possible
from scale_across.hardware import accelerator
from scale_across.model import ModelShape, Moe
from scale_across.parallelism import DP_OUTERMOST, FIELDS, FULL, PP_OUTERMOST, Parallelism, candidates, check
from scale_across.topology import Topology

MAX_SITES = 6
MICROBATCHES = (1, 2, 4, 8)
MAX_CP = 16
MIN_TOKENS_PER_CP_RANK = 2048
MAX_CHUNKS = 8
RECOMPUTES = (0, 1, 2)
CP, PP, DP, CHUNKS, MICROBATCH, ZERO, SHARD, RECOMPUTE, REDUCTION = (
    FIELDS.index(name) for name in ("cp", "pp", "dp", "chunks", "microbatch", "zero", "shard", "recompute", "reduction")
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Layout = tuple[int, int, bool]
"""What the network of a plan depends on: its GPUs, the GPUs of a stage, and whether it is interleaved."""


@dataclass(frozen=True)
class Rows:
    """Candidates of one region: columns of `Parallelism`, the batch they compute, their layout, their schedule."""

    plans_NF: Ints
    batch_NK: Floats
    """dp x microbatch x microbatches of a replica, by kind of GPU (`Region.setups`): the batch if all were like it."""
    layout_N: Ints
    """Index into `Region.layouts`."""
    family_N: Ints
    """Index into FAMILIES; -1: any of them; -2: any sharding too."""

    def __len__(self) -> int:
        return len(self.plans_NF)

    def take(self, chosen: Ints | slice) -> Rows:
        """Some of the rows."""
        return Rows(self.plans_NF[chosen], self.batch_NK[chosen], self.layout_N[chosen], self.family_N[chosen])

    @property
    def microbatches_NK(self) -> Ints:
        """Microbatches of a replica by kind of GPU."""
        each_N = self.plans_NF[:, DP] * self.plans_NF[:, MICROBATCH]
        return np.asarray(np.rint(self.batch_NK / each_N[:, None]), np.int64)


def joined(parts: list[Rows]) -> Rows:
    """One after another."""
    return Rows(
        np.concatenate([part.plans_NF for part in parts]),
        np.concatenate([part.batch_NK for part in parts]),
        np.concatenate([part.layout_N for part in parts]),
        np.concatenate([part.family_N for part in parts]),
    )


@dataclass(frozen=True)
class Space:
    """A job on a cluster, ready to be enumerated."""

    model: ModelShape
    topology: Topology
    job: TrainingJob
    microbatches: tuple[int, ...] = MICROBATCHES
    """Sequences per microbatch to choose from."""
    max_chunks: int = MAX_CHUNKS

    @classmethod
    def of(
        cls,
        model: ModelShape,
        topology: Topology,
        job: TrainingJob,
        microbatches: tuple[int, ...] = MICROBATCHES,
        max_chunks: int = MAX_CHUNKS,
    ) -> Space:
        """Raises ConfigError for more sites than can be enumerated."""
        count = len(topology.spec.sites)
        if count > MAX_SITES:
            raise ConfigError(f"cluster {topology.spec.name!r}: {count} sites; the search takes at most {MAX_SITES}")
        return cls(model, topology, job, microbatches, max_chunks)

    @cached_property
    def experts(self) -> int:
        """What the numbers of experts of all layers have in common; 0 without any."""
        return math.gcd(*{layer.ffn.experts for layer in self.model.layers if isinstance(layer.ffn, Moe)})

    def regions(self) -> Iterator[Region]:
        """Every set of sites that its own links connect, most GPUs first, with either axis crossing."""
        names = [site.name for site in self.topology.spec.sites]
        subsets = [chosen for n in range(1, len(names) + 1) for chosen in itertools.combinations(names, n)]
        for chosen in sorted(subsets, key=lambda chosen: -sum(self.topology.spec.site(name).gpus for name in chosen)):
            part = _part(self.topology, chosen)
            if part is not None:
                setup = Setup.of(self.model, part, self.job)
                names = sorted({site.accelerator for site in part.spec.sites})
                gpus = [slowed(accelerator(name).numbers(self.job.dtype), self.job.compute_share) for name in names]
                alone = tuple(replace(setup, gpu=gpu) for gpu in gpus)
                chips = [accelerator(site.accelerator) for site in part.spec.sites]
                crossings = Crossings(part, min(chip.calibration.network_fraction for chip in chips))
                levels = [name for name, *_ in part.tier_table()]
                inside = cluster_tiers(part, chips)[[name not in ("region", "global") for name in levels]]
                yield Region(self, part, setup, alone, tuple(names), DP_OUTERMOST, crossings, inside)
                yield Region(self, part, setup, (setup,), ("slowest",), PP_OUTERMOST, crossings, inside)


@dataclass(frozen=True)
class Region:
    """The plans over one set of sites with one axis outermost."""

    space: Space
    topology: Topology
    setup: Setup
    """With the slowest numbers of all GPUs."""
    setups: tuple[Setup, ...]
    """One for each kind of GPU when replicas may have shares of their own (DP outermost); else the slowest alone."""
    kinds: tuple[str, ...]
    """Accelerators of `setups`."""
    order: int
    crossings: Crossings
    inside_TF: Floats
    """Tiers inside a site at the bandwidths that collectives reach."""
    layouts: dict[Layout, int] = field(default_factory=dict)
    """Layout → its number, in order; filled by `relaxed`."""
    made: dict[tuple[tuple[str, ...], int], tuple[Floats, Floats]] = field(default_factory=dict)
    """Tables by technologies and number of layouts."""

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that its plans use, all of them."""
        return tuple(site.name for site in self.topology.spec.sites)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sites of the cluster that its plans do not use."""
        return tuple(site.name for site in self.space.topology.spec.sites if site.name not in self.sites)

    @cached_property
    def crossing(self) -> str:
        """The axis that crosses sites: dp, pp or none."""
        return "none" if len(self.sites) == 1 else ("dp" if self.order == DP_OUTERMOST else "pp")

    def units(self, plan: Parallelism) -> dict[str, int]:
        """Replicas (DP crosses, or one site) or stages (PP crosses) at each site, larger sites filled first."""
        whole, block = _unit(plan.tp, plan.cp, plan.pp, plan.dp, self.crossing)
        left = whole - len(self.sites)
        taken = dict.fromkeys(self.sites, 1)
        for site in sorted(self.topology.spec.sites, key=lambda site: -site.gpus):
            more = min(left, site.gpus // block - 1)
            taken[site.name] += more
            left -= more
        return taken

    def check(self, plan: Parallelism, schedule: str) -> None:
        """Raise ConfigError when the plan divides neither model nor sites, or the schedule is not possible for it."""
        check(
            plan,
            self.space.model,
            gpus=self.topology.spec.gpus,
            global_batch=plan.dp * plan.microbatch * self.count(plan),
            seq_len=self.space.job.seq_len,
        )
        block = _unit(plan.tp, plan.cp, plan.pp, plan.dp, self.crossing)[1]
        for site, units in self.units(plan).items():
            if units < 1 or units * block > self.topology.spec.site(site).gpus:
                raise ConfigError(
                    f"site {site!r}: {units} x {block} GPUs do not fit its {self.topology.spec.site(site).gpus}; "
                    f"the plan needs {plan.gpus} GPUs in units of {block}"
                )
        family = next(one for one in FAMILIES if one.name == schedule)
        numbers = [
            np.array([value]) for value in (plan.pp, plan.chunks, self.count(plan), self.space.job.seq_len // plan.cp)
        ]
        here = family.place in ("anywhere", "across" if self.crossing == "pp" else "inside")
        if not (here and possible(family, *numbers)[0]):
            raise ConfigError(
                f"schedule {schedule!r} is not possible with pp {plan.pp}, chunks {plan.chunks}, {self.count(plan)} "
                f"microbatches and {self.crossing} crossing sites"
            )

    def replicas_of_kind(self, plan: Parallelism) -> list[int]:
        """Replicas at each of `kinds`."""
        if len(self.kinds) == 1:
            return [plan.dp]
        spec, counts = self.topology.spec, dict.fromkeys(self.kinds, 0)
        for site, units in self.units(plan).items():
            counts[spec.site(site).accelerator] += units
        return list(counts.values())

    def count(self, plan: Parallelism) -> int:
        """Microbatches of the busiest replica when all have the same."""
        return math.ceil(self.batch / (plan.dp * plan.microbatch))

    def relaxed(self) -> Rows:
        """All rows of the region with sharding, reduction, recompute and schedule left open."""
        plans, batches, layouts = [], [], []
        for tp, cp, pp, dp, chunks in self._degrees():
            layout = self.layouts.setdefault(_layout(tp, cp, pp, dp, chunks), len(self.layouts))
            for microbatch in self.space.microbatches:
                count = math.ceil(self.space.job.global_batch / (dp * microbatch))
                wasted = dp * microbatch * (count - 1) >= self.space.job.global_batch
                if wasted or (chunks > 1 and count % pp) or (microbatch > 1 and dp * microbatch > self.batch):
                    continue
                for ep, etp in expert_splits(self.space.experts, tp, dp * cp * tp):
                    plans.append((tp, cp, ep, etp, pp, dp, chunks, microbatch))
                    batches.append([float(dp * microbatch * count)] * len(self.setups))
                    layouts.append(layout)
        columns = np.array(plans, np.int64).reshape(-1, 8)
        names = ("tp", "cp", "ep", "etp", "pp", "dp", "chunks", "microbatch")
        given = {name: columns[:, index] for index, name in enumerate(names)}
        # an optimizer sharded over all replicas takes least time
        rows = candidates(**given, zero=1, sp=(columns[:, 0] > 1).astype(np.int64), order=self.order)
        batch_NK = np.array(batches, np.float64).reshape(-1, len(self.setups))
        return Rows(rows, batch_NK, np.array(layouts, np.int64), np.full(len(rows), -2))

    def shardings(self, rows: Rows) -> Rows:
        """Every row with every sharding and reduction: replicated, optimizer, all, and all inside a site (HSDP)."""
        replicas_N = rows.plans_NF[:, DP] * rows.plans_NF[:, CP]
        sites = len(self.sites)
        parts = []
        for zero, inside in ((0, False), (1, False), (3, False), (3, True)):
            fits = (replicas_N > 1) | (zero == 0)
            if inside:
                fits &= (self.crossing == "dp") & (sites > 1) & (replicas_N % sites == 0) & (replicas_N > sites)
            for reduction in (RING, HIERARCHICAL):
                chosen = rows.take(np.flatnonzero(fits & ((replicas_N > 1) | (reduction == RING))))
                chosen.plans_NF[:, ZERO] = zero
                chosen.plans_NF[:, SHARD] = chosen.plans_NF[:, DP] * chosen.plans_NF[:, CP] // sites if inside else 0
                chosen.plans_NF[:, REDUCTION] = reduction
                chosen.family_N[:] = -1
                parts.append(chosen)
        return joined(parts)

    def schedules(self, rows: Rows) -> Rows:
        """Every row with every recompute and every schedule that is possible."""
        plans = rows.plans_NF
        tokens_N = self.space.job.seq_len // plans[:, CP]
        parts = []
        for index, family in enumerate(FAMILIES):
            if family.place not in ("anywhere", "across" if self.crossing == "pp" else "inside"):
                continue
            fits = possible(family, plans[:, PP], plans[:, CHUNKS], rows.microbatches_NK.min(axis=1), tokens_N)
            for recompute in RECOMPUTES:
                if not (family.split and recompute == FULL):
                    chosen = rows.take(np.flatnonzero(fits))
                    chosen.plans_NF[:, RECOMPUTE] = recompute
                    chosen.family_N[:] = index
                    parts.append(chosen)
        return joined(parts)

    @property
    def most_slices(self) -> float:
        """Of any schedule of the region."""
        return 4.0 if self.crossing == "pp" else 1.0

    @property
    def least_s(self) -> float:
        """No plan of the region is faster: its matrix products at the rate that the fastest GEMMs reach."""
        sites, by_kind = self.topology.spec.sites, dict(zip(self.kinds, self.setups, strict=True))
        rate = 0.0
        for site in sites:
            gpu = by_kind.get(site.accelerator, self.setup).gpu
            rate += site.gpus * gpu.flops * gpu.gemm_fraction
        return self.setup.model_numbers.flops_per_token * self.setup.job.seq * self.batch / rate

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.space.job.global_batch

    def layout(self, plan: Parallelism) -> Layout:
        """What the network of a plan depends on."""
        return _layout(plan.tp, plan.cp, plan.pp, plan.dp, plan.chunks)

    def setup_for(self, plan: Parallelism, technologies: tuple[str, ...], microbatches: int, kind: int = 0) -> Setup:
        """The setup as the replicas of one kind of GPU see it; rates count the padding of uneven shares as work."""
        tiers = self.tiers(self.layout(plan), technologies)
        job = self.setup.job._replace(global_batch=float(plan.dp * plan.microbatch * microbatches))
        names = tuple(f"tier {index}" for index in range(len(tiers) - 1))
        names += ("between sites" if len(self.sites) > 1 else f"tier {len(tiers) - 1}",)
        return replace(self.setups[kind], tiers_TF=tiers, tier_names=names, job=job)

    def tables(self, technologies: tuple[str, ...]) -> tuple[Floats, Floats]:
        """(tiers [layout, tier, 3], far [layout, fields of lower_bound.Far])."""
        key = (technologies, len(self.layouts))
        if key not in self.made:
            tiers = [self.tiers(layout, technologies) for layout in self.layouts]
            depth = max((len(table) for table in tiers), default=1)
            padded = [np.concatenate([table, np.repeat(table[-1:], depth - len(table), axis=0)]) for table in tiers]
            far = np.array([self._far(layout, technologies) for layout in self.layouts], np.float64)
            self.made[key] = np.array(padded, np.float64).reshape(-1, depth, 3), far.reshape(-1, 10)
        return self.made[key]

    def tiers(self, layout: Layout, technologies: tuple[str, ...]) -> Floats:
        """[tier, (GPUs, bytes/s, latency)] as a plan of this layout sees it.

        Sites count as equal to their mean. What crosses sites shares the links of the best order of the sites: as many
        flows as a site has GPUs for reductions (a ring over the sites), as a stage has for pipeline messages (a path;
        with interleaving a ring).
        """
        gpus = layout[0]
        mean = gpus / len(self.sites)
        kept = self.inside_TF[self.inside_TF[:, 0] < mean]
        edge = self.inside_TF[min(len(kept), len(self.inside_TF) - 1)].copy()
        edge[0] = mean * (1 + 1e-9)
        rows = [*kept, edge]
        if len(self.sites) > 1:
            found = self.crossing_of(layout, technologies)
            between = found.slowest_bytes_per_s, found.latency_s(self.crossing == "pp")
            rows.append(np.array([gpus * (1 + 1e-9), *between]))
        return np.array(rows, np.float64)

    def crossing_of(self, layout: Layout, technologies: tuple[str, ...]) -> Crossing:
        """The hops between sites for a layout."""
        gpus, stage_gpus, interleaved = layout
        pipeline = self.crossing == "pp"
        flows = stage_gpus if pipeline else math.ceil(gpus / len(self.sites))
        closed = not pipeline or interleaved
        return self.crossings.best(flows, closed=closed, both_ways=pipeline, technologies=technologies)

    def _far(self, layout: Layout, technologies: tuple[str, ...]) -> tuple[float, ...]:
        """The fields of `lower_bound.Far`."""
        if self.crossing != "pp":
            return 1.0, *(0.0,) * 8, 1.0
        found = self.crossing_of(layout, technologies)

        def faster(a: str, b: str) -> tuple[float, float]:
            ways = [found.hops[pair] for pair in ((a, b), (b, a))]
            return 1.0 / max(rate for rate, _ in ways), min(delay for _, delay in ways)

        path = [faster(a, b) for a, b in itertools.pairwise(found.sites)]
        closed = faster(found.sites[-1], found.sites[0]) if layout[2] else (0.0, 0.0)
        slowest = max(path)  # of equals the one that is farther
        through = sum(each_s for each_s, _ in path), sum(delay_s for _, delay_s in path)
        stages = self.units(Parallelism(tp=layout[1], pp=layout[0] // layout[1]))[found.sites[-1]]
        return float(len(self.sites)), *slowest, *through, *closed, *path[-1], float(stages)

    def _degrees(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(tp, cp, pp, dp, chunks) that divide the model and fit the sites."""
        model, sites = self.space.model, self.topology.spec.sites
        layers, node = len(model.layers), min(site.gpus_per_node for site in sites)
        heads = math.gcd(*(layer.attention.heads for layer in model.layers))
        pipelines: dict[int, list[int]] = {}
        for pp in range(1, layers + 3):
            valid = [c for c in range(1, self.space.max_chunks + 1) if _splits(layers, pp * c) and (pp > 1 or c == 1)]
            if valid:
                pipelines[pp] = valid
        for tp, cp in itertools.product(_powers(node), _powers(MAX_CP)):
            if (
                heads % tp
                or self.space.job.seq_len % cp
                or (cp > 1 and self.space.job.seq_len // cp < MIN_TOKENS_PER_CP_RANK)
            ):
                continue
            for pp, valid in pipelines.items():
                for dp in self._replicas(tp, cp, pp):
                    for chunks in valid:
                        yield tp, cp, pp, dp, chunks

    def _replicas(self, tp: int, cp: int, pp: int) -> list[int]:
        """The most replicas that fit, round numbers below, and divisors of the batch."""
        most = self._most_replicas(tp, cp, pp)
        divisors = [d for d in range(most, 0, -1) if self.batch % d == 0][:2] if most else []
        least = len(self.sites) if self.crossing == "dp" else 1
        return sorted({most, most // 8 * 8, most // 64 * 64, *divisors} - set(range(least)))

    def _most_replicas(self, tp: int, cp: int, pp: int) -> int:
        gpus = [site.gpus for site in self.topology.spec.sites]
        if self.crossing != "pp":
            fit = [g // (tp * cp * pp) for g in gpus]
            return min(sum(fit), self.batch) if min(fit) else 0
        low, high = 0, min(self.batch, min(gpus) // (tp * cp))
        if pp < len(gpus):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            fits = sum(g // (tp * cp * middle) for g in gpus) >= pp
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@lru_cache(maxsize=65536)
def expert_splits(experts: int, tp: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(ep, etp) that are possible on the ranks of a stage; experts are tensor-split fully or not at all."""
    if not experts:
        return ((1, 1),)
    return tuple(
        (ep, etp)
        for etp in sorted({1, tp})
        for ep in _powers(experts)
        if experts % ep == 0 and (ranks // etp) % ep == 0
    )


def _part(topology: Topology, chosen: tuple[str, ...]) -> Topology | None:
    """The sites alone with the links among them; None when these do not connect them."""
    spec = topology.spec
    if len(chosen) == len(spec.sites):
        return topology
    links = [link for link in spec.links if set(link.between) <= set(chosen)]
    reached = {chosen[0]}
    for _ in chosen:
        for link in links:
            if set(link.between) & reached:
                reached |= set(link.between)
    if len(reached) < len(chosen):
        return None
    sites = tuple(site for site in spec.sites if site.name in chosen)
    return Topology.from_cluster(ClusterSpec(name=spec.name, sites=sites, links=tuple(links)))


def _unit(tp: int, cp: int, pp: int, dp: int, crossing: str) -> tuple[int, int]:
    """(how many, GPUs each) of what a site hosts whole."""
    return (pp, tp * cp * dp) if crossing == "pp" else (dp, tp * cp * pp)


def _layout(tp: int, cp: int, pp: int, dp: int, chunks: int) -> Layout:
    return tp * cp * pp * dp, tp * cp * dp, chunks > 1


def _splits(layers: int, stages: int) -> bool:
    return layers + 2 >= stages and (layers % stages == 0 or (layers + 2) % stages == 0)


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]
