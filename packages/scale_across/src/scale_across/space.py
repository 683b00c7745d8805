"""The space of training plans over sites: which sites, which axis crosses them, how many replicas or stages at each.

    space = Space.of(model, topology, job)
    for region in space.regions():          # one choice of sites and of the axis that crosses them
        rows = region.relaxed()             # degrees, microbatch, chunks, experts; not yet ZeRO, recompute, reduction

Of a choice of sites each hosts whole replicas (DP crosses) or whole stages (PP crosses), as many as it has room for, so
unequal sites get unequal shares, and a site may be left out. Replicas that do not divide the batch get one microbatch
more or less. Limits of the space: TP stays inside a node; all GPUs of a plan run at the pace of its slowest kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.estimate import Setup, TrainingJob, cluster_tiers
from scale_across.hardware import accelerator
from scale_across.model import ModelShape, Moe
from scale_across.parallelism import DP_OUTERMOST, PP_OUTERMOST, Parallelism, candidates
from scale_across.step import Estimate
from scale_across.topology import Topology

MAX_SITES = 6
MICROBATCHES = (1, 2, 4, 8)
MAX_CP = 16
MIN_TOKENS_PER_CP_RANK = 2048
MAX_CHUNKS = 8
FINE = tuple(itertools.product((0, 1, 3), (0, 1, 2), (0, 1)))
"""(zero, recompute, reduction): what a relaxed row leaves open."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Candidates of one region: columns of `Parallelism`, the batch they compute, the tiers they see."""

    plans_NF: Ints
    batch_N: Floats
    """dp x microbatch x microbatches of the busiest replica: at least the global batch."""
    layout_N: Ints
    tiers_LTF: Floats

    def __len__(self) -> int:
        return len(self.plans_NF)

    def take(self, index: npt.ArrayLike) -> Rows:
        """Some of the rows."""
        chosen = np.asarray(index)
        return Rows(self.plans_NF[chosen], self.batch_N[chosen], self.layout_N[chosen], self.tiers_LTF)

    def expand(self) -> Rows:
        """Every row with every choice of FINE; reductions differ only where there is something to reduce."""
        zero, recompute, reduction = np.array(FINE, np.int64).T
        plans = np.repeat(self.plans_NF, len(FINE), axis=0)
        tiled = len(self.plans_NF)
        fields = Parallelism._fields
        plans[:, fields.index("zero")] = np.tile(zero, tiled)
        plans[:, fields.index("recompute")] = np.tile(recompute, tiled)
        plans[:, fields.index("reduction")] = np.tile(reduction, tiled)
        return Rows(plans, np.repeat(self.batch_N, len(FINE)), np.repeat(self.layout_N, len(FINE)), self.tiers_LTF)


@dataclass(frozen=True)
class Space:
    """A job on a cluster, ready to be enumerated."""

    model: ModelShape
    topology: Topology
    job: TrainingJob

    @classmethod
    def of(cls, model: ModelShape, topology: Topology, job: TrainingJob) -> Space:
        """Raises ConfigError for more sites than can be enumerated."""
        count = len(topology.spec.sites)
        if count > MAX_SITES:
            raise ConfigError(f"cluster {topology.spec.name!r}: {count} sites; the search takes at most {MAX_SITES}")
        return cls(model, topology, job)

    def regions(self) -> Iterator[Region]:
        """Every set of sites that its own links connect, most GPUs first, with either axis crossing."""
        names = [site.name for site in self.topology.spec.sites]
        subsets = [chosen for n in range(1, len(names) + 1) for chosen in itertools.combinations(names, n)]
        for chosen in sorted(subsets, key=lambda chosen: -sum(self.topology.spec.site(name).gpus for name in chosen)):
            part = _part(self.topology, chosen)
            if part is not None:
                setup = Setup.of(self.model, part, self.job)
                for order in (DP_OUTERMOST, PP_OUTERMOST):
                    yield Region(self, part, setup, order)


@dataclass(frozen=True)
class Region:
    """The plans over one set of sites with one axis outermost."""

    space: Space
    topology: Topology
    setup: Setup
    order: int

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that its plans use, all of them."""
        return tuple(site.name for site in self.topology.spec.sites)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sites of the cluster that its plans do not use."""
        return tuple(site.name for site in self.space.topology.spec.sites if site.name not in self.sites)

    @property
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

    def relaxed(self) -> Rows:
        """All rows of the region with ZeRO, recompute and reduction left at 1, none and ring."""
        plans, batches, layouts = [], [], []
        tables: dict[tuple[int, int, int], int] = {}
        tiers: list[Floats] = []
        for tp, cp, pp, dp, chunks in self._degrees():
            for microbatch in MICROBATCHES:
                count = math.ceil(self.space.job.global_batch / (dp * microbatch))
                wasted = dp * microbatch * (count - 1) >= self.space.job.global_batch
                if wasted or (chunks > 1 and count % pp) or (microbatch > 1 and dp * microbatch > self.batch):
                    continue
                key = _layout(tp, cp, pp, dp, chunks)
                if key not in tables:
                    tables[key] = len(tiers)
                    tiers.append(self.tiers(*key))
                for ep, etp in self._experts(tp, cp, dp):
                    plans.append((tp, cp, ep, etp, pp, dp, chunks, microbatch))
                    batches.append(dp * microbatch * count)
                    layouts.append(tables[key])
        columns = np.array(plans, np.int64).reshape(-1, 8)
        names = ("tp", "cp", "ep", "etp", "pp", "dp", "chunks", "microbatch")
        given = {name: columns[:, index] for index, name in enumerate(names)}
        rows = candidates(**given, zero=1, sp=(columns[:, 0] > 1).astype(np.int64), order=self.order)
        depth = max((len(table) for table in tiers), default=1)
        padded = [np.concatenate([table, np.repeat(table[-1:], depth - len(table), axis=0)]) for table in tiers]
        stacked = np.array(padded, np.float64).reshape(-1, depth, 3)
        return Rows(rows, np.array(batches, np.float64), np.array(layouts, np.int64), stacked)

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.space.job.global_batch

    def estimate(self, plan: Parallelism) -> Estimate:
        """One plan of the region, all columns; rates count the padding of uneven shares as work."""
        count = math.ceil(self.batch / (plan.dp * plan.microbatch))
        tiers = self.tiers(*_layout(plan.tp, plan.cp, plan.pp, plan.dp, plan.chunks))
        job = self.setup.job._replace(global_batch=float(plan.dp * plan.microbatch * count))
        return replace(self.setup, tiers_TF=tiers, job=job).estimate(plan)

    def tiers(self, gpus: int, stage_gpus: int, chunks: int) -> Floats:
        """[tier, (GPUs, bytes/s, latency)] as a plan on `gpus` GPUs sees it; `stage_gpus` of them make a stage.

        Sites count as equal to their mean. What crosses sites shares the links of the best order of the sites: as many
        flows as a site has GPUs for reductions (a ring over the sites), as a stage has for pipeline messages (a path;
        with interleaving a ring).
        """
        mean = gpus / len(self.sites)
        chips = [accelerator(site.accelerator) for site in self.topology.spec.sites]
        inside = cluster_tiers(self.topology, chips)
        names = [name for name, *_ in self.topology.tier_table()]
        inside = inside[[name not in ("region", "global") for name in names]]
        kept = inside[inside[:, 0] < mean]
        edge = inside[min(len(kept), len(inside) - 1)].copy()
        edge[0] = mean * (1 + 1e-9)
        rows = [*kept, edge]
        if len(self.sites) > 1:
            fraction = min(chip.calibration.network_fraction for chip in chips)
            flows = stage_gpus if self.crossing == "pp" else math.ceil(mean)
            rate, latency_s = self._between(flows, closed=self.crossing == "dp" or chunks > 1)
            rows.append(np.array([gpus * (1 + 1e-9), rate * fraction, latency_s]))
        return np.array(rows, np.float64)

    def _between(self, flows: int, *, closed: bool) -> tuple[float, float]:
        """Least bytes/s of one of `flows` flows, and latency, over the best order of the sites."""
        best: tuple[float, float] | None = None
        both_ways = self.crossing == "pp"
        for order in itertools.permutations(self.sites):
            if closed and order[0] != self.sites[0]:
                continue
            hops = [*itertools.pairwise(order), *([(order[-1], order[0])] if closed else [])]
            used = hops + [(b, a) for a, b in hops if both_ways]
            shares = self.topology.share(list(dict.fromkeys(used)))
            costs = [self.topology.between_sites(a, b, flows) for a, b in hops]
            rate = min(min(shares) / flows, *(cost.bytes_per_s for cost in costs), math.inf)
            delays = [cost.latency_s for cost in costs]
            latency_s = max(delays) if both_ways else sum(delays) / len(delays)
            if best is None or (rate, -latency_s) > (best[0], -best[1]):
                best = (rate, latency_s)
        assert best is not None
        return best

    def _degrees(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(tp, cp, pp, dp, chunks) that divide the model and fit the sites."""
        model, sites = self.space.model, self.topology.spec.sites
        layers, node = len(model.layers), min(site.gpus_per_node for site in sites)
        heads = math.gcd(*(layer.attention.heads for layer in model.layers))
        pipelines: dict[int, list[int]] = {}
        for pp in range(1, layers + 3):
            valid = [c for c in range(1, MAX_CHUNKS + 1) if _splits(layers, pp * c) and (pp > 1 or c == 1)]
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

    def _experts(self, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
        """(ep, etp) that are possible; experts are tensor-split fully or not at all."""
        counts = {layer.ffn.experts for layer in self.space.model.layers if isinstance(layer.ffn, Moe)}
        if not counts:
            return [(1, 1)]
        experts = math.gcd(*counts)
        return [
            (ep, etp) for etp in sorted({1, tp}) for ep in _powers(experts)
            if experts % ep == 0 and (dp * cp * tp // etp) % ep == 0
        ]  # fmt: skip


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


def _layout(tp: int, cp: int, pp: int, dp: int, chunks: int) -> tuple[int, int, int]:
    """What the tiers of a plan depend on: GPUs, GPUs of a stage, and whether it is interleaved (2)."""
    return tp * cp * pp * dp, tp * cp * dp, min(chunks, 2)


def _splits(layers: int, stages: int) -> bool:
    return layers + 2 >= stages and (layers % stages == 0 or (layers + 2) % stages == 0)


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]
