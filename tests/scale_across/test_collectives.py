"""Collective times against hand-worked values, ASTRA-sim's, and what must hold for any network."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_across.collectives import (
    HIERARCHICAL,
    RING,
    all_reduce_s,
    all_to_all_s,
    bidirectional_ring_all_reduce_s,
    broadcast_s,
    chunked_hierarchical_all_reduce_s,
    halving_doubling_all_reduce_s,
    hierarchical_phase_s,
    phase_s,
    point_to_point_s,
    ring_phase_s,
    tree_all_reduce_s,
)

GIB = 2.0**30
MIB = 2.0**20
NODES = np.array([[8, 100e9, 1e-6], [64, 10e9, 10e-6]])
"""Nodes of 8 GPUs at 100 GB/s, 8 nodes at 10 GB/s per GPU."""


def test_a_ring_inside_a_node() -> None:
    """7/8 of 80 MB at 100 GB/s, and 7 of 8 hops of 1 us."""
    assert ring_phase_s(NODES, 80e6, 8, 1) == pytest.approx(0.7e-3 + 7e-6)


def test_a_ring_over_nodes_uses_every_port_and_pays_every_hop() -> None:
    """16 ranks on 2 nodes: 8 ports of 10 GB/s carry 15/16 of 80 MB; a lap has 14 near hops and 2 far ones."""
    lap_s = 14 * 1e-6 + 2 * 10e-6
    assert ring_phase_s(NODES, 80e6, 16, 1) == pytest.approx(80e6 * 15 / 16 / 80e9 + lap_s * 15 / 16)


def test_ranks_one_per_node_have_one_port_each() -> None:
    assert ring_phase_s(NODES, 80e6, 8, 8) == pytest.approx(80e6 * 7 / 8 / 10e9 + 8 * 10e-6 * 7 / 8)


def test_hierarchical_sends_an_eighth_across_nodes() -> None:
    inside = 80e6 * 7 / 8 / 100e9 + 7 * 1e-6
    across = 10e6 * 1 / 2 / 10e9 + 10e-6
    assert hierarchical_phase_s(NODES, 80e6, 16, 1) == pytest.approx(inside + across)
    assert all_reduce_s(NODES, 80e6, 16, 1, HIERARCHICAL) == pytest.approx(2 * (inside + across))


def test_all_to_all_sends_what_is_for_other_nodes_through_the_port() -> None:
    """Of 16 MB, half is for the other node: 8 MB at 10 GB/s; inside, 7/16 at 100 GB/s is hidden behind it."""
    assert all_to_all_s(NODES, 16e6, 16, 1) == pytest.approx(8e6 / 10e9 + 10e-6)


def test_single_tier_algorithms_by_hand() -> None:
    assert point_to_point_s(NODES, 10e6, 1) == pytest.approx(1e-3 + 10e-6)
    assert halving_doubling_all_reduce_s(8e6, 8, 1e9, 1e-3) == pytest.approx(14e-3 + 6e-3)
    assert tree_all_reduce_s(8e6, 8, 1e9, 1e-3) == pytest.approx(14e-3 + 6e-3)
    assert bidirectional_ring_all_reduce_s(8e6, 8, 1e9, 1e-3) == pytest.approx(7e-3 + 8e-3)
    assert broadcast_s(8e6, 5, 1e9, 1e-3, 4) == pytest.approx((3 + 4) * 2e-3 + 4e-3)


@pytest.mark.parametrize(
    ("dimensions", "expected_ns"),
    [
        ([(8, 300 * GIB, 2 * 0.5e-6), (4, 25 * GIB, 2 * 10e-6)], 1_430_696),
        ([(32, 25 * GIB, 2 * 10e-6)], 12_721_200),
    ],
)
def test_astra_sim_check_values(dimensions: list[tuple[int, float, float]], expected_ns: float) -> None:
    """100 MiB all-reduce of ASTRA-sim 2 (analytical, congestion unaware) under its conventions."""
    seconds = chunked_hierarchical_all_reduce_s(dimensions, 100 * MIB, 4, reduce_bytes_per_s=1600e9, endpoint_s=10e-9)
    assert seconds * 1e9 == pytest.approx(expected_ns, rel=1e-4)


TIERS = st.builds(
    lambda sizes, rates, latencies: np.array(
        [[math.prod(sizes[: i + 1]), rates[i], latencies[i]] for i in range(len(sizes))], np.float64
    ),
    st.lists(st.integers(2, 8), min_size=3, max_size=3),
    st.lists(st.floats(1e8, 1e12), min_size=3, max_size=3),
    st.lists(st.floats(0, 1e-2), min_size=3, max_size=3),
)


@settings(max_examples=30, deadline=None)
@given(TIERS, st.sampled_from([RING, HIERARCHICAL]), st.floats(1, 1e10), st.data())
def test_a_better_network_or_less_data_is_never_slower(
    tiers_TF: np.ndarray, algorithm: int, nbytes: float, data: st.DataObject
) -> None:
    whole = int(tiers_TF[-1, 0])
    stride = data.draw(st.sampled_from([d for d in range(1, whole + 1) if whole % d == 0]))
    size = whole // stride
    before = phase_s(tiers_TF, nbytes, size, stride, algorithm)
    exchange = all_to_all_s(tiers_TF, nbytes, size, stride)
    tier = data.draw(st.integers(0, 2))
    faster, nearer = tiers_TF.copy(), tiers_TF.copy()
    faster[tier, 1] *= 2
    nearer[tier, 2] /= 2
    for better in (faster, nearer):
        assert phase_s(better, nbytes, size, stride, algorithm) <= before * (1 + 1e-12)
        assert all_to_all_s(better, nbytes, size, stride) <= exchange * (1 + 1e-12)
    assert phase_s(tiers_TF, nbytes / 2, size, stride, algorithm) <= before
