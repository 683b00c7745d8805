"""What a flow between sites gets: the order in which a plan passes the sites, shared links, network technology.

All flows of a plan that cross sites run at once and share links by max-min fairness; on every hop the technology then
loses to uneven balancing, loss recovery or the window (`network.py`). Of the allowed technologies a plan takes the one
with the highest rate on its slowest hop: since a step is never slower with more bandwidth, no other choice can win,
and what a technology costs in hardware is not modelled.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from scale_across.network import NetworkLink, Technology, effective
from scale_across.network_loss import window_limit_gbps
from scale_across.topology import Topology

TECHNOLOGIES: dict[str, Technology] = {
    "e-ecmp": Technology(balancing="e-ecmp", queue_pairs=16),
    "e-ecmp-64": Technology(balancing="e-ecmp", queue_pairs=64),
    "spray": Technology(balancing="adaptive-spray", queue_pairs=16),
    "spray-64": Technology(balancing="adaptive-spray", queue_pairs=64),
}
"""Queue pairs per GPU pair; all recover lost packets selectively. The first is production (NCCLX's default)."""
PRODUCTION = "e-ecmp"


@dataclass(frozen=True)
class Crossing:
    """The hops of a plan between its sites."""

    sites: tuple[str, ...]
    """In the order in which the plan passes them."""
    technology: str
    hops: dict[tuple[str, str], tuple[float, float]]
    """(site, next site) → (bytes/s of one flow, latency in s), both directions where both are used."""
    limits: dict[tuple[str, str], str]
    """What holds each hop back; see `network.Effective.limit`."""

    @property
    def slowest_bytes_per_s(self) -> float:
        """Of one flow."""
        return min(rate for rate, _ in self.hops.values())

    @property
    def fastest(self) -> tuple[float, float]:
        """(highest rate, lowest latency) of any hop."""
        return max(rate for rate, _ in self.hops.values()), min(delay for _, delay in self.hops.values())

    def latency_s(self, both_ways: bool) -> float:
        """Of the farthest hop of a pipeline, or the mean around a ring."""
        delays = [delay for _, delay in self.hops.values()]
        return max(delays) if both_ways else sum(delays) / len(delays)


class Crossings:
    """The crossings of one cluster; keeps what does not depend on the plan."""

    def __init__(self, topology: Topology, share: float) -> None:
        self.topology = topology
        self.share = share
        """Of the nominal bandwidth, what collectives reach."""
        self._orders: dict[tuple[bool, bool], list[_Order]] = {}
        self._best: dict[tuple[int, bool, bool, tuple[str, ...]], Crossing] = {}

    def best(self, flows: int, *, closed: bool, both_ways: bool, technologies: tuple[str, ...]) -> Crossing:
        """The order of the sites and the technology with most bytes/s on the slowest hop, least latency among equals.

        Args:
            flows: that cross each hop at once.
            closed: the last site sends to the first (rings, interleaved pipelines).
            both_ways: neighbours send to each other (pipelines); else round the ring only.
            technologies: names to choose from; of equals the first.
        """
        key = (flows, closed, both_ways, technologies)
        if key not in self._best:
            found = [
                _priced(self.topology, order, name, flows, self.share)
                for order in self._worthwhile(closed, both_ways)
                for name in technologies
            ]
            self._best[key] = max(found, key=lambda one: (one.slowest_bytes_per_s, -one.latency_s(both_ways)))
        return self._best[key]

    def _worthwhile(self, closed: bool, both_ways: bool) -> list[_Order]:
        """Orders of the sites that no other order beats in both bandwidth and latency."""
        if (closed, both_ways) not in self._orders:
            names = tuple(site.name for site in self.topology.spec.sites)
            orders = [order for order in itertools.permutations(names) if not closed or order[0] == names[0]]
            made = sorted(
                (self._order(order, closed, both_ways) for order in orders),
                key=lambda one: (-min(one.shares), one.latency_s),
            )
            kept: list[_Order] = []
            for one in made:
                if not kept or one.latency_s < kept[-1].latency_s:
                    kept.append(one)
            self._orders[closed, both_ways] = kept
        return self._orders[closed, both_ways]

    def _order(self, order: tuple[str, ...], closed: bool, both_ways: bool) -> _Order:
        hops = [*itertools.pairwise(order), *([(order[-1], order[0])] if closed else [])]
        used = list(dict.fromkeys([*hops, *((b, a) for a, b in hops if both_ways)]))
        delays = [self.topology.route(a, b).latency_s for a, b in used]
        latency_s = max(delays) if both_ways else sum(delays) / len(delays)
        return _Order(order, used, self.topology.share(used), latency_s)


@dataclass(frozen=True)
class _Order:
    sites: tuple[str, ...]
    used: list[tuple[str, str]]
    shares: list[float]
    latency_s: float


def _priced(topology: Topology, order: _Order, name: str, flows: int, share: float) -> Crossing:
    hops, limits = {}, {}
    for (a, b), capacity in zip(order.used, order.shares, strict=True):
        route, cost = topology.route(a, b), topology.between_sites(a, b, flows)
        wire, limit = _reached(capacity, 2.0 * cost.latency_s, route.paths, route.loss, name, flows)
        port = cost.bytes_per_s
        hops[a, b] = (min(wire / flows, port) * share, cost.latency_s)
        limits[a, b] = limit if wire / flows <= port else "port"
    return Crossing(order.sites, name, hops, limits)


@lru_cache(maxsize=65536)
def _reached(
    bytes_per_s: float, rtt_s: float, paths: int, loss: float, technology: str, flows: int
) -> tuple[float, str]:
    """(bytes/s of all flows together, what limits them) over a hop.

    The exact distribution of hashed flows is slow for thousands, so flows count as the next lower half power of two
    for the balance (some per cent too low at most); for the window they count as they are.
    """
    chosen = TECHNOLOGIES[technology]
    rounded = int(2.0 ** (math.floor(2.0 * math.log2(flows)) / 2.0))
    link = NetworkLink(gbps=bytes_per_s * 8e-9, rtt_s=0.0, paths=paths, loss=loss)
    found = effective(link, chosen, pairs=rounded)
    window_bytes = chosen.messages * chosen.message_bytes
    window_gbps = float(window_limit_gbps(flows * chosen.queue_pairs, 1, window_bytes, rtt_s)) * (1.0 - loss)
    if window_gbps < found.gbps:
        return window_gbps / 8e-9, "window"
    return found.gbps / 8e-9, found.limit
