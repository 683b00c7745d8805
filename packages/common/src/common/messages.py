"""Which messages a collective sends, and when they arrive over links that serve one message after another.

One description serves both sides: `common.collectives` sends exactly these messages, `common.links` books exactly these
times on the emulated links, and the Explorer prices a plan with `finish_time_s`. Prediction and run cannot drift apart.
Plain Python, no dependencies beyond `common.spec`.

The link model: a message from site A to site B takes the route of least latency. It starts when all links of the route
are free in its direction, occupies each for bytes / bandwidth of that link, and arrives after the slowest of these plus
the summed latency (cut-through). Inside a site a message arrives at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Literal

from common.spec import ClusterSpec

Reduction = Literal["ring", "hierarchical"]
Broadcast = Literal["star", "relay"]


@dataclass(frozen=True)
class Message:
    """`nbytes` from rank `src` to rank `dst`.

    A rank sends its messages of a round once it has received all of its messages of earlier rounds.
    """

    round: int
    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True)
class Route:
    """The way from one site to another: `hops` are (index into spec.links, direction 0 or 1)."""

    hops: tuple[tuple[int, int], ...]
    latency_s: float
    s_per_byte: tuple[float, ...]


class Routes:
    """Least-latency routes between all sites of a cluster (ties: fewer hops, then the order of the links)."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._routes = {site.name: self._from(site.name) for site in cluster.sites}

    def __call__(self, src: str, dst: str) -> Route:
        """The route from site `src` to site `dst`; no hops inside a site. KeyError for an unknown site."""
        return self._routes[src][dst]

    def _from(self, start: str) -> dict[str, Route]:
        found: dict[str, Route] = {}
        frontier: list[tuple[float, int, int, str, tuple[tuple[int, int], ...]]] = [(0.0, 0, 0, start, ())]
        ticket = 0
        while frontier:
            latency_s, _, _, here, hops = heapq.heappop(frontier)
            if here in found:
                continue
            rates = tuple(8 / (self.cluster.links[link].bandwidth_gbps * 1e9) for link, _ in hops)
            found[here] = Route(hops, latency_s, rates)
            for index, link in enumerate(self.cluster.links):
                if here in link.between:
                    direction = link.between.index(here)
                    ticket += 1
                    step = (index, direction)
                    heapq.heappush(
                        frontier,
                        (
                            latency_s + link.latency_us * 1e-6,
                            len(hops) + 1,
                            ticket,
                            link.between[1 - direction],
                            (*hops, step),
                        ),
                    )
        return found


def book(route: Route, busy_until_s: MutableSequence[float], now_s: float, nbytes: int) -> float:
    """Book a message on the links of its route and return when it arrives.

    Args:
        busy_until_s: per link and direction (index 2 * link + direction), until when it is taken; updated in place.
        now_s: the message is ready to leave; same clock as `busy_until_s`.
    """
    if not route.hops:
        return now_s
    start_s = max(now_s, *(busy_until_s[2 * link + direction] for link, direction in route.hops))
    for (link, direction), rate in zip(route.hops, route.s_per_byte, strict=True):
        busy_until_s[2 * link + direction] = start_s + nbytes * rate
    return start_s + nbytes * max(route.s_per_byte) + route.latency_s


def finish_time_s(routes: Routes, sites: Sequence[str], messages: Sequence[Message]) -> float:
    """Seconds from a common start until every message has arrived, over otherwise idle links.

    `sites[r]` is the site of rank r. Messages that become ready at the same time are booked in the order given.
    """
    busy_until_s = [0.0] * (2 * len(routes.cluster.links))
    waiting: dict[int, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    missing: dict[tuple[int, int], int] = defaultdict(int)  # (rank, round) -> messages of that round not yet received
    for message in messages:
        waiting[message.src][message.round].append(message)
        missing[message.dst, message.round] += 1
    ready_s: dict[int, float] = defaultdict(float)
    events: list[tuple[float, int, Message]] = []
    last_round = max((message.round for message in messages), default=-1)
    cleared = dict.fromkeys({rank for m in messages for rank in (m.src, m.dst)}, -1)  # rounds whose messages have gone
    ticket = 0
    end_s = 0.0

    def release(rank: int) -> None:
        nonlocal ticket
        while cleared[rank] < last_round:
            upcoming = cleared[rank] + 1
            if any(missing[rank, earlier] for earlier in range(upcoming)):
                return
            cleared[rank] = upcoming
            for message in waiting[rank].pop(upcoming, ()):
                heapq.heappush(events, (ready_s[rank], ticket, message))
                ticket += 1

    for rank in list(cleared):
        release(rank)
    arrivals: list[tuple[float, int, Message]] = []
    while events or arrivals:
        if arrivals and (not events or arrivals[0][0] <= events[0][0]):
            at_s, _, message = heapq.heappop(arrivals)
            end_s = max(end_s, at_s)
            ready_s[message.dst] = max(ready_s[message.dst], at_s)
            missing[message.dst, message.round] -= 1
            release(message.dst)
        else:
            now_s, order, message = heapq.heappop(events)
            at_s = book(routes(sites[message.src], sites[message.dst]), busy_until_s, now_s, message.nbytes)
            heapq.heappush(arrivals, (at_s, order, message))
    return end_s


# -- the collectives -----------------------------------------------------------------------------------------------


def chunk_bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Cut `length` elements into `parts` nearly equal (start, stop) ranges."""
    return [(length * part // parts, length * (part + 1) // parts) for part in range(parts)]


def by_site(sites: Sequence[str]) -> list[list[int]]:
    """Ranks grouped by site, groups in the order of their first rank; the first rank of a group leads it."""
    groups: dict[str, list[int]] = {}
    for rank, site in enumerate(sites):
        groups.setdefault(site, []).append(rank)
    return list(groups.values())


def ring_messages(ranks: Sequence[int], length: int, item_bytes: int, first_round: int = 0) -> list[Message]:
    """Ring all-reduce over `ranks` (Patarasu and Yuan 2009): n-1 rounds of reduce-scatter, then n-1 of all-gather.

    In round t, position p sends chunk (p - t) mod n to position p+1; each chunk is 1/n of `length` elements.
    """
    n = len(ranks)
    bounds = chunk_bounds(length, n)
    messages = []
    for t in range(2 * (n - 1)):
        for position in range(n):
            start, stop = bounds[(position - t) % n]
            messages.append(
                Message(first_round + t, ranks[position], ranks[(position + 1) % n], (stop - start) * item_bytes)
            )
    return messages


def all_reduce_messages(kind: Reduction, sites: Sequence[str], length: int, item_bytes: int = 4) -> list[Message]:
    """Messages of an all-reduce of `length` elements over ranks at `sites`.

    ring: one flat ring in rank order. hierarchical: every rank sends its data to the leader of its site (round 0), the
    leaders run a ring, and each leader sends the result to its site's ranks (last round).
    """
    nbytes = length * item_bytes
    if kind == "ring":
        return ring_messages(range(len(sites)), length, item_bytes)
    groups = by_site(sites)
    inward = [Message(0, rank, group[0], nbytes) for group in groups for rank in group[1:]]
    across = ring_messages([group[0] for group in groups], length, item_bytes, first_round=1)
    last = 1 + 2 * (len(groups) - 1)
    outward = [Message(last, group[0], rank, nbytes) for group in groups for rank in group[1:]]
    return [*inward, *across, *outward]


def broadcast_messages(kind: Broadcast, sites: Sequence[str], length: int, item_bytes: int = 4) -> list[Message]:
    """Messages of a broadcast of `length` elements from rank 0 to all others.

    star: rank 0 sends to every rank in turn, so a link carries the data once per rank behind it. relay: rank 0 sends
    to one rank of each other site, which passes the data on inside its site.
    """
    nbytes = length * item_bytes
    if kind == "star":
        return [Message(0, 0, rank, nbytes) for rank in range(1, len(sites))]
    home, *others = by_site(sites)
    messages = [Message(0, 0, group[0], nbytes) for group in others]
    messages += [Message(0, 0, rank, nbytes) for rank in home[1:]]
    messages += [Message(1, group[0], rank, nbytes) for group in others for rank in group[1:]]
    return messages
