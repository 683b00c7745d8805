"""Who reaches whom how fast: GPUs in nodes, racks, zones and sites, sites in regions, links between sites.

A `ClusterSpec` becomes a `Topology`. Two GPUs of one site meet at a tier: the innermost domain (node, rack, zone, site)
that holds both. Leaving a node takes the GPU's network port; going up into tier u from a domain of g GPUs, all share
g x port / oversubscription. Sites are joined by links; traffic takes the route of least latency, the widest of equals.

Bandwidths are bytes/s per direction and nominal (no protocol efficiency), latencies one way in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from common.spec import ClusterSpec, Site
from scale_across.hardware import accelerator
from scale_across.site_network import GBPS, Tier, load_cluster, site_tiers

MAX_GPUS = 2**24


@dataclass(frozen=True)
class Route:
    """The links between two sites."""

    sites: tuple[str, ...]
    """From source to destination, both included."""
    bytes_per_s: float
    """Capacity of the narrowest link or uplink on the way, for all flows together."""
    latency_s: float
    paths: int = 1
    """Of the link with the fewest; 1 inside a site."""
    loss: float = 0.0
    """Probability that a packet is lost on one of the links."""


@dataclass(frozen=True)
class PathCost:
    """What one flow between two places gets."""

    tier: str
    """Where they meet: a tier of their site, `region` (two sites of one), or `global`."""
    bytes_per_s: float
    latency_s: float


class Topology:
    """A cluster's network. Made by `from_cluster` or `load`; immutable by convention."""

    def __init__(self, spec: ClusterSpec, tiers: dict[str, tuple[Tier, ...]]) -> None:
        self.spec = spec
        self.tiers = tiers
        """Site → its tiers, innermost first; the last holds the whole site."""
        self.sites = nx.Graph()
        """Sites (`gpus`, `region`, `uplink`) and the links between them (`bytes_per_s`, `latency_s`)."""
        for site in spec.sites:
            uplink = site.uplink_gbps * GBPS if site.uplink_gbps else math.inf
            self.sites.add_node(site.name, gpus=site.gpus, region=site.region, uplink=uplink)
        for link in spec.links:
            self.sites.add_edge(
                *link.between, bytes_per_s=link.bandwidth_gbps * GBPS, latency_s=link.latency_us * 1e-6,
                paths=link.paths, loss=link.loss,
            )  # fmt: skip
        self._levels = _levels(tiers.values())
        self._routes: dict[tuple[str, str], Route] = {}

    @classmethod
    def from_cluster(cls, spec: ClusterSpec) -> Topology:
        """Resolve each site's tiers: given, by name of a network, or a flat network with the accelerator's numbers.

        Raises:
            ConfigError: unknown network or accelerator; domains that do not grow or nest; more than 2^24 GPUs.
        """
        if spec.gpus > MAX_GPUS:
            raise ConfigError(f"cluster {spec.name!r}: {spec.gpus} GPUs; at most {MAX_GPUS} can be modelled")
        return cls(spec, {site.name: site_tiers(site) for site in spec.sites})

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Topology:
        """The topology of a shipped cluster or of a YAML file; see `load_cluster`."""
        return cls.from_cluster(load_cluster(name_or_path))

    # Between sites

    def route(self, source: str, target: str) -> Route:
        """Links from one site to another: least latency first, then the greatest capacity.

        Raises:
            ConfigError: no such site.
        """
        self._check(source, target)
        if (source, target) not in self._routes:
            self._routes[source, target] = _best_route(self.sites, source, target)
        return self._routes[source, target]

    def between_sites(self, source: str, target: str, flows: int | None = None) -> PathCost:
        """One of `flows` equal flows between GPUs of two sites; None: every GPU of the smaller one has a flow."""
        _check_flows(flows)
        route = self.route(source, target)
        if source == target:
            return self._within(source, len(self.tiers[source]) - 1, flows)
        ends = [self._exit(source, flows), self._exit(target, flows)]
        crowd = flows or min(self.sites.nodes[source]["gpus"], self.sites.nodes[target]["gpus"])
        together = self.sites.nodes[source]["region"] == self.sites.nodes[target]["region"]
        return PathCost(
            tier="region" if together else "global",
            bytes_per_s=min(route.bytes_per_s / crowd, *(end.bytes_per_s for end in ends)),
            latency_s=max(self._port_latency_s(source), self._port_latency_s(target)) + route.latency_s,
        )

    def share(self, flows: Sequence[tuple[str, str]]) -> list[float]:
        """Bytes/s of each flow (source site, target site) when all run at once, max-min fair.

        Links count per direction, uplinks too; flows inside one site are unlimited here (inf). More capacity never
        lowers the slowest flow. Method: progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).
        """
        room: dict[tuple[str, str], float] = {}
        crossed: list[set[tuple[str, str]]] = []
        for source, target in flows:
            sites = self.route(source, target).sites
            used: set[tuple[str, str]] = set(itertools.pairwise(sites))
            if len(sites) > 1:
                used |= {("out of", source), ("into", target)}
            for key in used:
                room[key] = self._capacity(key)
            crossed.append(used)
        rates = [math.inf] * len(flows)
        waiting = {i for i, used in enumerate(crossed) if used}
        while waiting:
            crowd = Counter(key for i in waiting for key in crossed[i])
            tightest = min(crowd, key=lambda key: room[key] / crowd[key])
            rate = room[tightest] / crowd[tightest]
            full = {i for i in waiting if tightest in crossed[i]}
            for i in full:
                rates[i] = rate
                for key in crossed[i]:
                    room[key] = max(0.0, room[key] - rate)
            waiting -= full
        return rates

    def _check(self, *sites: str) -> None:
        for name in sites:
            if name not in self.sites:
                raise ConfigError(f"site {name!r}: unknown; sites are {', '.join(self.sites)}")

    def _capacity(self, key: tuple[str, str]) -> float:
        first, second = key
        if first in ("out of", "into"):
            return float(self.sites.nodes[second]["uplink"])
        return float(self.sites.edges[first, second]["bytes_per_s"])

    # Inside a site

    def between_gpus(self, a: tuple[str, int], b: tuple[str, int], flows: int | None = None) -> PathCost:
        """What one flow gets between two GPUs, each given as (site, index in the site).

        `flows` run in all through every shared switch on the way, this one included; None: every GPU below sends.
        """
        self._check(a[0], b[0])
        _check_flows(flows)
        for site, index in (a, b):
            if not 0 <= index < self.sites.nodes[site]["gpus"]:
                raise ConfigError(
                    f"GPU {index} of site {site!r}: it has GPUs 0 to {self.sites.nodes[site]['gpus'] - 1}"
                )
        if a[0] != b[0]:
            return self.between_sites(a[0], b[0], flows)
        tiers = self.tiers[a[0]]
        meet = next(t for t, tier in enumerate(tiers) if a[1] // tier.gpus == b[1] // tier.gpus)
        return self._within(a[0], meet, flows)

    def _within(self, site: str, meet: int, flows: int | None) -> PathCost:
        """One of `flows` flows between GPUs that meet at tier `meet` of `site`."""
        tiers = self.tiers[site]
        if meet == 0:
            return PathCost(tiers[0].name, tiers[0].port_bytes_per_s / tiers[0].oversubscription, tiers[0].latency_s)
        rate = math.inf
        for below, tier in itertools.pairwise(tiers[: meet + 1]):
            crowd = below.gpus if flows is None else min(flows, below.gpus)
            up = below.gpus * tier.port_bytes_per_s / tier.oversubscription
            rate = min(rate, tier.port_bytes_per_s, up / crowd)
        return PathCost(tiers[meet].name, rate, tiers[meet].latency_s)

    def _exit(self, site: str, flows: int | None) -> PathCost:
        """What one flow gets on its way out of `site`."""
        tiers = self.tiers[site]
        if len(tiers) > 1:
            return self._within(site, len(tiers) - 1, flows)
        chip = accelerator(self.spec.site(site).accelerator)
        return PathCost("site", chip.network_gbps * GBPS, chip.network_latency_us * 1e-6)

    def _port_latency_s(self, site: str) -> float:
        """Latency of a network port by itself: that of the innermost tier outside the node."""
        tiers = self.tiers[site]
        return tiers[1].latency_s if len(tiers) > 1 else self._exit(site, None).latency_s

    # The whole, for estimates

    def tier_table(self) -> list[tuple[str, int, float, float]]:
        """(name, GPUs in one domain, bytes/s per GPU with all GPUs sending, latency in s), innermost first.

        Over unequal sites each row is the worst of them: smallest domain, least bandwidth, longest latency. A row whose
        smallest domain is no larger than the row before is left out, its traffic counted at the next one. A link is
        divided by all GPUs of its smaller site.
        """
        table: list[tuple[str, int, float, float]] = []
        for row in self._rows():
            if not table or row[1] > table[-1][1]:
                table.append(row)
        return table

    def link(self, tier: str) -> tuple[float, float]:
        """(bytes/s per GPU with all GPUs sending, latency in s) between GPUs that meet at `tier`, at the worst site.

        Raises:
            ConfigError: no such tier.
        """
        rows = {name: (bytes_per_s, latency_s) for name, _, bytes_per_s, latency_s in self._rows()}
        if tier not in rows:
            raise ConfigError(f"tier {tier!r}: unknown; this cluster has {', '.join(rows)}")
        return rows[tier]

    def _rows(self) -> list[tuple[str, int, float, float]]:
        """One row for every level of the cluster, as in `tier_table`."""
        rows = []
        for level in self._levels:
            costs = [self._within(site, self._at_level(site, level), None) for site in self.tiers]
            gpus = [tiers[self._at_level(site, level)].gpus for site, tiers in self.tiers.items()]
            rows.append(_worst(level, min(gpus), costs))
        for level, smallest, pairs in self._site_pairs():
            if pairs:
                rows.append(_worst(level, smallest, [self.between_sites(a, b) for a, b in pairs]))
        return rows

    def _at_level(self, site: str, level: str) -> int:
        """Index of the tier at which GPUs of `site` meet when they are in one domain of `level`."""
        rank = self._levels.index(level)
        tiers = self.tiers[site]
        return next((t for t, x in enumerate(tiers) if self._levels.index(x.name) >= rank), len(tiers) - 1)

    def _site_pairs(self) -> list[tuple[str, int, list[tuple[str, str]]]]:
        """For `region` and `global`: GPUs in the smallest domain, and the pairs of sites that meet there."""
        regions: dict[str, int] = Counter()
        for site in self.spec.sites:
            regions[site.region] += site.gpus
        near: list[tuple[str, str]] = []
        far: list[tuple[str, str]] = []
        for a, b in itertools.combinations(self.spec.sites, 2):
            (near if a.region == b.region else far).append((a.name, b.name))
        return [("region", min(regions.values()), near), ("global", self.spec.gpus, far)]

    def tiers_for_group(self, size: int, stride: int = 1, world: int | None = None) -> tuple[tuple[str, int], ...]:
        """Tiers that a group of `size` ranks, `stride` apart, spans when ranks fill GPUs densely in site order.

        Groups fill blocks of size x stride of the `world` ranks (by default as many as fit). The result has
        (tier, ways) for each tier at which a group spreads, innermost first: over how many domains of the tier below,
        in the group that spreads most. The last entry is the tier that the group spans; a group of one has none.

        Raises:
            ConfigError: a group does not fit, or does not divide the world.
        """
        block = max(size * stride, 1)
        ranks = self.spec.gpus // block * block if world is None else world
        if min(size, stride, ranks) < 1 or ranks > self.spec.gpus or ranks % block:
            raise ConfigError(
                f"group of {size} ranks, stride {stride}: size x stride {block} must divide the {ranks} ranks "
                f"of the job and fit on {self.spec.gpus} GPUs"
            )
        spans, below = [], size
        for name, ids in self._domains(ranks):
            members = ids.reshape(-1, size, stride)
            touched = 1 + int((members[:, 1:] != members[:, :-1]).sum(axis=1).max(initial=0))
            if touched < below:
                spans.append((name, math.ceil(below / touched)))
                below = touched
        return tuple(spans)

    def _domains(self, ranks: int) -> list[tuple[str, npt.NDArray[np.int64]]]:
        """(level, domain of each of the first `ranks` GPUs), innermost first."""
        sites = self.spec.sites
        sizes = np.array([site.gpus for site in sites])
        site_of = np.repeat(np.arange(len(sizes)), sizes)[:ranks]
        inside = np.arange(ranks) - (np.cumsum(sizes) - sizes)[site_of]
        domains = []
        for level in self._levels:
            gpus = np.array([self.tiers[site.name][self._at_level(site.name, level)].gpus for site in sites])
            domains.append((level, site_of * MAX_GPUS + inside // gpus[site_of]))
        regions = list(dict.fromkeys(site.region for site in sites))
        region_of = np.array([regions.index(site.region) for site in sites])
        return [*domains, ("region", region_of[site_of]), ("global", np.zeros(ranks, np.int64))]

    def graph(self, down_to: str = "node") -> nx.Graph:
        """The cluster as a networkx graph: `global` over regions over sites over their tiers, down to `down_to`.

        Nodes are paths like `east-a/zone0/rack3/node7` with `tier` and `gpus`. Edges upward have `tier`,
        `bytes_per_s` (the whole domain's), `oversubscription` and `latency_s`; edges between sites are the links.
        `down_to` may be `gpu`, the name of a tier, or `site`.
        """
        graph = nx.Graph()
        graph.add_node(self.spec.name, tier="global", gpus=self.spec.gpus)
        for site in self.spec.sites:
            region = f"region {site.region}" if site.region else self.spec.name
            if site.region:
                gpus = sum(other.gpus for other in self.spec.sites if other.region == site.region)
                graph.add_node(region, tier="region", gpus=gpus)
                graph.add_edge(self.spec.name, region, tier="global")
            graph.add_node(site.name, tier="site", gpus=site.gpus)
            graph.add_edge(region, site.name, tier="region", bytes_per_s=self.sites.nodes[site.name]["uplink"])
            if down_to != "site":
                _add_tree(graph, site, self.tiers[site.name], down_to)
        graph.add_edges_from((a, b, {"tier": "link", **data}) for a, b, data in self.sites.edges(data=True))
        return graph


def _check_flows(flows: int | None) -> None:
    if flows is not None and flows < 1:
        raise ConfigError(f"flows {flows}: must be at least 1, or None for all GPUs")


def _levels(sites: Iterable[tuple[Tier, ...]]) -> list[str]:
    """Names of the tiers of all sites, smallest domain first; `site` is the last."""
    smallest: dict[str, int] = {}
    for tiers in sites:
        for tier in tiers:
            smallest[tier.name] = min(tier.gpus, smallest.get(tier.name, tier.gpus))
    return sorted(smallest, key=lambda name: (name == "site", smallest[name]))


def _add_tree(graph: nx.Graph, site: Site, tiers: tuple[Tier, ...], down_to: str) -> None:
    """Hang the domains of one site under its node."""
    names = ["gpu", *(tier.name for tier in tiers[:-1])]
    if down_to not in names and down_to != "node":
        raise ConfigError(f"down_to {down_to!r}: site {site.name!r} has {', '.join([*names, 'site'])}")
    parents = {0: site.name}
    parent_gpus = site.gpus
    for t in range(len(tiers) - 1, -1, -1):
        name, gpus = (tiers[t - 1].name, tiers[t - 1].gpus) if t else ("gpu", 1)
        if t == 0 and down_to != "gpu":
            break
        children = {}
        for i in range(math.ceil(site.gpus / gpus)):
            parent = parents[i * gpus // parent_gpus]
            child = f"{parent}/{name}{i * gpus % parent_gpus // gpus}"
            held = min(gpus, site.gpus - i * gpus)
            graph.add_node(child, tier=name, gpus=held)
            graph.add_edge(
                parent,
                child,
                tier=tiers[t].name,
                bytes_per_s=held * tiers[t].port_bytes_per_s / tiers[t].oversubscription,
                oversubscription=tiers[t].oversubscription,
                latency_s=tiers[t].latency_s,
            )
            children[i] = child
        parents, parent_gpus = children, gpus
        if name == down_to:
            break


def _worst(name: str, gpus: int, costs: Sequence[PathCost]) -> tuple[str, int, float, float]:
    """A row that promises no more than any of `costs`."""
    return name, gpus, min(cost.bytes_per_s for cost in costs), max(cost.latency_s for cost in costs)


def _best_route(sites: nx.Graph, source: str, target: str) -> Route:
    """Dijkstra on (latency, -capacity): both grow along a path, so the first arrival at the target is the best."""
    start = float(sites.nodes[source]["uplink"]) if source != target else math.inf
    queue: list[tuple[float, float, tuple[str, ...]]] = [(0.0, -start, (source,))]
    settled: set[str] = set()
    while queue:
        latency_s, width, path = heapq.heappop(queue)
        here = path[-1]
        if here == target:
            end = float(sites.nodes[target]["uplink"]) if source != target else math.inf
            links = [sites.edges[pair] for pair in itertools.pairwise(path)]
            loss = 1.0 - math.prod(1.0 - link["loss"] for link in links)
            return Route(path, min(-width, end), latency_s, min((x["paths"] for x in links), default=1), loss)
        if here in settled:
            continue
        settled.add(here)
        for there, link in sites.adj[here].items():
            if there not in settled:
                entry = (latency_s + link["latency_s"], max(width, -link["bytes_per_s"]), (*path, there))
                heapq.heappush(queue, entry)
    raise ConfigError(f"no path from site {source!r} to {target!r}; add a link between them")
