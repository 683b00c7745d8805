"""Message sequences and their timing against values worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import (
    Message,
    Routes,
    all_reduce_messages,
    book,
    broadcast_messages,
    finish_time_s,
)
from common.spec import ClusterSpec, Link, Site

MB = 1_000_000


def two_sites(gbps: float = 0.8, latency_us: float = 1000) -> Routes:
    """0.8 Gb/s: 1 MB takes 10 ms; 1 ms of latency."""
    link = Link(between=("a", "b"), bandwidth_gbps=gbps, latency_us=latency_us)
    return Routes(ClusterSpec(sites=(Site(name="a", gpus=8), Site(name="b", gpus=8)), links=(link,)))


def test_one_message_takes_transmission_plus_latency() -> None:
    assert finish_time_s(two_sites(), ["a", "b"], [Message(0, 0, 1, MB)]) == pytest.approx(0.011)


def test_inside_a_site_nothing_waits() -> None:
    assert finish_time_s(two_sites(), ["a", "a"], [Message(0, 0, 1, MB)]) == 0


def test_messages_of_one_direction_queue_and_opposite_ones_do_not() -> None:
    routes = two_sites()
    same = [Message(0, 0, 2, MB), Message(0, 1, 2, MB)]
    assert finish_time_s(routes, ["a", "a", "b"], same) == pytest.approx(0.021)
    opposite = [Message(0, 0, 1, MB), Message(0, 1, 0, MB)]
    assert finish_time_s(routes, ["a", "b"], opposite) == pytest.approx(0.011)


def test_a_later_round_waits_for_the_rounds_before() -> None:
    chain = [Message(0, 0, 1, MB), Message(1, 1, 0, MB)]
    assert finish_time_s(two_sites(), ["a", "b"], chain) == pytest.approx(0.022)


def test_routes_take_least_latency_and_the_slowest_link_sets_the_pace() -> None:
    sites = tuple(Site(name=n, gpus=1) for n in "abc")
    links = (
        Link(between=("a", "b"), bandwidth_gbps=0.8, latency_us=1000),
        Link(between=("b", "c"), bandwidth_gbps=0.4, latency_us=2000),
        Link(between=("a", "c"), bandwidth_gbps=80, latency_us=50_000),
    )
    route = Routes(ClusterSpec(sites=sites, links=links))("a", "c")
    assert route.hops == ((0, 0), (1, 0))
    busy = [0.0] * 6
    assert book(route, busy, 0.0, MB) == pytest.approx(0.020 + 0.003)
    assert busy == pytest.approx([0.010, 0, 0.020, 0, 0, 0])


def test_ring_of_two_sites_moves_half_the_data_each_way_twice() -> None:
    messages = all_reduce_messages("ring", ["a", "b"], 1000)
    assert sorted(m.nbytes for m in messages) == [2000] * 4
    assert finish_time_s(two_sites(), ["a", "b"], all_reduce_messages("ring", ["a", "b"], MB // 4)) == pytest.approx(
        2 * (0.005 + 0.001)
    )


def test_hierarchical_crosses_the_link_once_per_site_where_a_scattered_ring_crosses_it_at_every_hop() -> None:
    sites = ["a", "b", "a", "b"]
    crossing = {
        kind: sum(m.nbytes for m in all_reduce_messages(kind, sites, 1000) if sites[m.src] != sites[m.dst])
        for kind in ("ring", "hierarchical")
    }
    assert crossing == {"ring": 6 * 4 * 1000, "hierarchical": 2 * 2 * 2000}


def test_relay_carries_the_data_once_per_site_and_star_once_per_worker() -> None:
    sites = ["a", "b", "b", "b"]
    assert finish_time_s(two_sites(), sites, broadcast_messages("star", sites, MB // 4)) == pytest.approx(0.031)
    assert finish_time_s(two_sites(), sites, broadcast_messages("relay", sites, MB // 4)) == pytest.approx(0.011)


SITES = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SITES, st.integers(0, 5000), st.sampled_from(["ring", "hierarchical"]))
def test_every_rank_receives_and_a_ring_moves_2_n_minus_1_times_the_data(
    sites: list[str], length: int, kind: str
) -> None:
    messages = all_reduce_messages(kind, sites, length)  # type: ignore[arg-type]
    if kind == "ring":
        assert sum(m.nbytes for m in messages) == 2 * (len(sites) - 1) * length * 4
    receivers = {m.dst for m in messages}
    assert len(sites) == 1 or receivers == set(range(len(sites)))


@settings(max_examples=40, deadline=None)
@given(SITES, st.floats(1, 10), st.floats(0, 1))
def test_more_bandwidth_and_less_latency_never_slow_a_collective(
    sites: list[str], faster: float, nearer: float
) -> None:
    base, better = two_sites(), two_sites(0.8 * faster, 1000 * nearer)
    for messages in (
        all_reduce_messages("ring", sites, 10_000),
        all_reduce_messages("hierarchical", sites, 10_000),
        broadcast_messages("star", sites, 10_000),
        broadcast_messages("relay", sites, 10_000),
    ):
        assert finish_time_s(better, sites, messages) <= finish_time_s(base, sites, messages) + 1e-12
