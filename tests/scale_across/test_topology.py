"""Tiers, routes and shared links against hand-worked values; more capacity never makes a path slower."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError, validate
from common.spec import ClusterSpec, Link, Site, TierSpec
from scale_across.site_network import GBPS, load_cluster, load_network
from scale_across.topology import Topology

few = settings(max_examples=25, deadline=None)

TIERS = (
    TierSpec(name="node", gpus=4, bandwidth_gbps=800, latency_us=1),
    TierSpec(name="rack", gpus=8, bandwidth_gbps=100, latency_us=2),
    TierSpec(name="site", bandwidth_gbps=100, oversubscription=4, latency_us=10),
)


def cluster(*gpus: int, links: tuple[Link, ...] = (), regions: str = "", **more: float) -> Topology:
    """Sites a, b, c, ... with `TIERS`; one letter of `regions` each."""
    names = "abcdefgh"[: len(gpus)]
    sites = tuple(
        Site(name=name, gpus=n, gpus_per_node=4, tiers=TIERS, region=regions[i : i + 1], **more)
        for i, (name, n) in enumerate(zip(names, gpus, strict=True))
    )
    return Topology.from_cluster(ClusterSpec(sites=sites, links=links))


def line(a: str, b: str, gbps: float, us: float) -> Link:
    return Link(between=(a, b), bandwidth_gbps=gbps, latency_us=us)


TRIANGLE = (line("a", "b", 40, 10), line("b", "c", 20, 10), line("a", "c", 80, 50))


def test_two_gpus_meet_at_the_innermost_common_domain() -> None:
    topology = cluster(32)
    expected = {1: ("node", 800, 1), 5: ("rack", 100, 2), 9: ("site", 25, 10)}
    for index, (tier, gbps, us) in expected.items():
        cost = topology.between_gpus(("a", 0), ("a", index))
        assert (cost.tier, cost.bytes_per_s, cost.latency_s) == (tier, gbps * GBPS, pytest.approx(us * 1e-6))


def test_oversubscription_binds_only_under_load() -> None:
    """A rack's 8 ports of 100 Gb/s share 200 Gb/s upward: two flows keep their ports, four get 50 each."""
    topology = cluster(32)
    rates = [topology.between_gpus(("a", 0), ("a", 9), flows=n).bytes_per_s / GBPS for n in (1, 2, 4, 8, 100)]
    assert rates == [100, 100, 50, 25, 25]


def test_routes_go_by_latency_then_by_capacity() -> None:
    topology = cluster(8, 8, 8, links=TRIANGLE)
    route = topology.route("a", "c")
    assert (route.sites, route.bytes_per_s, route.latency_s) == (("a", "b", "c"), 20 * GBPS, pytest.approx(20e-6))
    tie = (line("a", "b", 5, 10), line("b", "d", 5, 10), line("a", "c", 7, 10), line("c", "d", 9, 10))
    route = cluster(8, 8, 8, 8, links=tie).route("a", "d")
    assert (route.sites, route.bytes_per_s) == (("a", "c", "d"), 7 * GBPS)
    assert topology.route("b", "b").bytes_per_s == math.inf


def test_a_flow_between_sites_shares_links_and_uplinks() -> None:
    topology = cluster(8, 8, 8, links=TRIANGLE)
    one, four = topology.between_sites("a", "b", flows=1), topology.between_sites("a", "b", flows=4)
    assert one.bytes_per_s == 40 * GBPS
    assert four.bytes_per_s == 10 * GBPS
    assert topology.between_sites("a", "b").bytes_per_s == 5 * GBPS  # 8 GPUs a side
    assert one.latency_s == pytest.approx(12e-6)  # a port's 2 us and the link's 10 us
    narrow = cluster(8, 8, 8, links=TRIANGLE, uplink_gbps=16)
    assert narrow.between_sites("a", "b", flows=4).bytes_per_s == 4 * GBPS


def test_max_min_shares() -> None:
    """a-b carries three flows of 40/3; the b-c link is the bottleneck of a-c and b-c, 10 each, so a-b has 30 left."""
    topology = cluster(8, 8, 8, links=TRIANGLE)
    assert [x / GBPS for x in topology.share([("a", "b")] * 2)] == [20, 20]
    flows = [("a", "c"), ("b", "c"), ("a", "b")]
    assert [x / GBPS for x in topology.share(flows)] == pytest.approx([10, 10, 30])
    assert [x / GBPS for x in topology.share([("a", "b"), ("b", "a")])] == [40, 40]  # full duplex
    assert topology.share([("a", "a")]) == [math.inf]
    hub = cluster(8, 8, 8, links=TRIANGLE, uplink_gbps=16)
    assert [x / GBPS for x in hub.share([("a", "b"), ("a", "b"), ("c", "b")])] == pytest.approx([16 / 3] * 3)


def test_tier_table_of_one_site() -> None:
    names, gpus, rates, latencies = zip(*cluster(32).tier_table(), strict=True)
    assert names == ("node", "rack", "site")
    assert gpus == (4, 8, 32)
    assert [r / GBPS for r in rates] == [800, 100, 25]
    assert latencies == pytest.approx([1e-6, 2e-6, 10e-6])


def test_tier_table_takes_the_worst_of_unequal_sites() -> None:
    topology = cluster(32, 16, 16, links=TRIANGLE, regions="eew")
    table = {name: (gpus, rate / GBPS) for name, gpus, rate, _ in topology.tier_table()}
    assert table == {"node": (4, 800), "rack": (8, 100), "site": (16, 25), "global": (64, 20 / 16)}
    one_region = cluster(32, 16, 16, links=TRIANGLE)
    assert one_region.tier_table()[-1][:2] == ("region", 64)
    assert one_region.link("region") == one_region.tier_table()[-1][2:]
    with pytest.raises(ConfigError, match="tier 'zone': unknown; this cluster has node, rack, site, region"):
        one_region.link("zone")


def test_a_site_as_small_as_a_rack_hides_no_tier() -> None:
    """The table has no row between 8 and 32, so a's racks are counted as if apart; `link` and groups still know."""
    topology = cluster(24, 8, links=(line("a", "b", 40, 10),))
    assert [row[:2] for row in topology.tier_table()] == [("node", 4), ("rack", 8), ("region", 32)]
    assert topology.link("site") == (25 * GBPS, pytest.approx(10e-6))
    assert topology.tiers_for_group(2, 8, world=16) == (("site", 2),)


def test_groups_of_densely_laid_ranks() -> None:
    topology = cluster(32, 32, links=(line("a", "b", 40, 10),))
    assert topology.tiers_for_group(1, 4) == ()
    assert topology.tiers_for_group(4, 1) == (("node", 4),)
    assert topology.tiers_for_group(2, 4) == (("rack", 2),)
    assert topology.tiers_for_group(8, 4) == (("rack", 2), ("site", 4))
    assert topology.tiers_for_group(8, 8) == (("site", 4), ("region", 2))
    assert topology.tiers_for_group(64) == (("node", 4), ("rack", 2), ("site", 4), ("region", 2))
    assert topology.tiers_for_group(2, 16, world=32) == (("site", 2),)
    with pytest.raises(ConfigError, match="group of 3 ranks, stride 7: size x stride 21 must divide the 64 ranks"):
        topology.tiers_for_group(3, 7, world=64)


def test_a_group_that_straddles_sites_is_found() -> None:
    """24 and 40 GPUs: of the blocks of 16, the second lies across the border."""
    topology = cluster(24, 40, links=(line("a", "b", 40, 10),))
    assert topology.tiers_for_group(16)[-1] == ("region", 2)
    assert topology.tiers_for_group(8)[-1][0] == "rack"


@few
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_groups_agree_with_a_look_at_every_gpu(sites: int, log_size: int, log_stride: int) -> None:
    links = tuple(line(x, y, 10, 10) for x, y in itertools.pairwise("abcdef"[:sites]))
    topology = cluster(*[24, 8, 12, 32, 16, 8][:sites], links=links)
    size, stride = 2**log_size, 2**log_stride
    gpus = [(site.name, i) for site in topology.spec.sites for i in range(site.gpus)]
    order = ["node", "rack", "site", "region"]
    worst = -1
    for start in range(0, len(gpus) // (size * stride) * size * stride, size * stride):
        for first in range(start, start + stride):
            group = gpus[first : start + size * stride : stride]
            tiers = [topology.between_gpus(a, b).tier for a, b in itertools.combinations(group, 2)]
            worst = max([worst, *(order.index(tier) for tier in tiers)])
    if len(gpus) >= size * stride:
        found = topology.tiers_for_group(size, stride)
        assert (order.index(found[-1][0]) if found else -1) == worst


def test_graph_has_every_domain() -> None:
    topology = cluster(32, 20, links=(line("a", "b", 40, 10),), regions="ew")
    graph = topology.graph("gpu")
    count = {tier: sum(d["tier"] == tier for _, d in graph.nodes(data=True)) for tier in ("gpu", "node", "rack")}
    assert count == {"gpu": 52, "node": 8 + 5, "rack": 4 + 3}
    assert sum(graph.nodes[n]["gpus"] for n in graph if graph.nodes[n]["tier"] == "rack") == 52
    rack = graph.edges["a", "a/rack0"]
    assert (rack["tier"], rack["bytes_per_s"], rack["oversubscription"]) == ("site", 8 * 25 * GBPS, 4)
    assert graph.edges["a", "b"]["latency_s"] == pytest.approx(10e-6)
    assert nx.has_path(graph, "a/rack3/node1/gpu3", "b/rack2/node0/gpu0")
    assert set(topology.graph("site")) == {"cluster", "region e", "region w", "a", "b"}
    with pytest.raises(ConfigError, match="down_to 'hall': site 'a' has gpu, node, rack, site"):
        topology.graph("hall")


capacities = st.lists(st.floats(1, 1000), min_size=6, max_size=6)
latencies = st.lists(st.sampled_from([0.0, 10.0, 20.0]), min_size=6, max_size=6)


@few
@given(capacities, latencies, st.integers(0, 5), st.floats(1, 10), st.integers(1, 40))
def test_more_capacity_never_hurts(gbps: list[float], us: list[float], raised: int, factor: float, flows: int) -> None:
    pairs = list(itertools.combinations("abcd", 2))

    def build(capacity: list[float]) -> Topology:
        return cluster(16, 8, 24, 8, links=tuple(line(*p, c, x) for p, c, x in zip(pairs, capacity, us, strict=True)))

    before = build(gbps)
    after = build([c * factor if i == raised else c for i, c in enumerate(gbps)])
    for a, b in pairs:
        for n in (flows, None):
            assert after.between_sites(a, b, n).bytes_per_s >= before.between_sites(a, b, n).bytes_per_s
    assert [r[2] for r in after.tier_table()] >= [r[2] for r in before.tier_table()]
    # a wider link may draw more routes onto itself; over the same routes nobody's least share falls
    if all(after.route(*pair).sites == before.route(*pair).sites for pair in pairs):
        everyone = [pair for pair in pairs for _ in range(flows)]
        assert min(after.share(everyone)) >= min(before.share(everyone)) * (1 - 1e-9)


@few
@given(st.integers(1, 64), st.floats(1, 8), st.floats(1, 8), st.floats(1, 4))
def test_faster_ports_and_less_oversubscription_never_hurt(flows: int, over: float, less: float, faster: float) -> None:
    def build(oversubscription: float, port: float) -> Topology:
        top = TierSpec(name="site", bandwidth_gbps=100, oversubscription=oversubscription, latency_us=5)
        tiers = (TIERS[0], TierSpec(name="rack", gpus=8, bandwidth_gbps=port, latency_us=2), top)
        return Topology.from_cluster(ClusterSpec(sites=(Site(name="a", gpus=64, tiers=tiers),)))

    before, after = build(over * less, 90), build(over, 90 * faster)
    for other in (1, 5, 20):
        old, new = (t.between_gpus(("a", 0), ("a", other), flows).bytes_per_s for t in (before, after))
        assert new >= old


def test_presets() -> None:
    meta = Topology.load("meta-region")
    assert meta.spec.gpus == 102_400
    names, gpus, rates, latencies = zip(*meta.tier_table(), strict=True)
    assert names == ("node", "rack", "zone", "site", "region")
    assert gpus == (8, 16, 2560, 20480, 102_400)
    assert rates[1] / rates[3] == pytest.approx(2.8)
    assert rates[1] / rates[4] == pytest.approx(2.8, rel=1e-5)
    assert [x / latencies[1] for x in latencies[1:]] == pytest.approx([1, 7, 15, 30])
    pods = Topology.load("llama3-24k").tier_table()
    assert [row[1] for row in pods] == [8, 16, 3072, 24576]
    assert pods[1][2] / pods[3][2] == pytest.approx(7)
    for name, flow_gbps in (("same-campus", 400), ("same-region", 11.3), ("cross-region", 5.0)):
        two = Topology.load(f"crosspipe-{name}")
        assert two.between_sites("a", "b", flows=1).bytes_per_s == pytest.approx(flow_gbps * GBPS)
    cloud = Topology.load("cloud-regions")
    assert {site.accelerator for site in cloud.spec.sites} == {"h100-sxm", "a100-80g"}
    assert cloud.tier_table()[1][2] == 200 * GBPS  # the A100's port


def test_a_small_site_needs_no_outer_tiers() -> None:
    site = Site(name="a", gpus=16, accelerator="h100-sxm", network="meta")
    assert [row[:2] for row in Topology.from_cluster(ClusterSpec(sites=(site,))).tier_table()] == [
        ("node", 8),
        ("rack", 16),
    ]


def spec(**site: object) -> ClusterSpec:
    return validate(ClusterSpec, {"sites": [{"name": "a", "gpus": 64, **site}]})


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"network": "mta"}, "network 'mta': unknown; shipped are llama3-pods, meta"),
        ({"network": "meta", "tiers": [{"name": "node"}]}, "both network 'meta' and tiers"),
        ({"accelerator": "h1000"}, "accelerator 'h1000'"),
        ({"tiers": [{"name": "node"}, {"name": "rack"}, {"name": "site"}]}, "'rack': gpus: required"),
        ({"tiers": [{"name": "node"}, {"name": "rack", "gpus": 12}, {"name": "site"}]}, "gpus 12: must be a multiple"),
        ({"tiers": [{"name": "node"}, {"name": "rack", "gpus": 4}, {"name": "site"}]}, "gpus 4: must be a multiple"),
        ({"tiers": [{"name": "node", "gpus": 8}, {"name": "rack", "gpus": 16}]}, "holds 16 of 64 GPUs; add one"),
        ({"tiers": [{"name": "node", "oversubscription": 0.5}]}, r"tiers.0.oversubscription: .*greater.*\(found 0.5\)"),
        ({"tiers": [{"name": "node", "bandwidth_gbps": -1}]}, r"tiers.0.bandwidth_gbps: .*\(found -1\)"),
        ({"tiers": [{"name": "node", "oversubscribtion": 2}]}, "did you mean 'oversubscription'"),
        ({"gpus": 2**25}, "at most 16777216 can be modelled"),
    ],
)
def test_unusable_networks(site: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.from_cluster(spec(**site))


def test_unusable_places(tmp_path: Path) -> None:
    topology = cluster(8, 8, links=(line("a", "b", 1, 1),))
    with pytest.raises(ConfigError, match="site 'x': unknown; sites are a, b"):
        topology.route("a", "x")
    with pytest.raises(ConfigError, match="GPU 8 of site 'a': it has GPUs 0 to 7"):
        topology.between_gpus(("a", 0), ("a", 8))
    with pytest.raises(ConfigError, match="flows 0: must be at least 1"):
        topology.between_sites("a", "b", flows=0)
    with pytest.raises(ConfigError, match="cluster 'mars': unknown; shipped are cloud-regions"):
        load_cluster("mars")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsource: me\ntiers:\n  - {name: node, gpus: 8}\n  - {name: site}\n")
    assert [tier.name for tier in load_network(str(path)).tiers] == ["node", "site"]
