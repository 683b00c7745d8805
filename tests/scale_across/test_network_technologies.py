"""Network-layer technologies against values worked by hand from their sources."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError, validate
from scale_across import network_classes as classes
from scale_across import network_ecmp as ecmp
from scale_across import network_loss as loss
from scale_across.network import NetworkLink, Technology, chunked_hierarchical_all_reduce_s, effective, effective_gbps

few = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize(
    ("flows", "paths", "mean"),
    [
        (2, 2, 3 / 2),  # apart or together with 1/2 each
        (3, 3, 17 / 9),  # of 27: 6 with load 1, 18 with 2, 3 with 3
        (4, 2, 11 / 4),  # of 16: 6 with 2, 8 with 3, 2 with 4
        (1, 16, 1.0),
        (5, 1, 5.0),
    ],
)
def test_fullest_path_by_hand(flows: int, paths: int, mean: float) -> None:
    assert ecmp.expected_max_load(flows, paths) == pytest.approx(mean, abs=1e-9)


def test_birthdays_are_balls_in_bins() -> None:
    """23 people, 365 days: all birthdays differ with probability 0.492703 (the birthday problem)."""
    assert ecmp.max_load_cdf(23, 365)[1] == pytest.approx(0.492703, abs=1e-6)


def test_ecmp_efficiency_follows_the_fullest_path() -> None:
    assert ecmp.ecmp_efficiency(3, 3) == pytest.approx(9 / 17)
    # half the load: two flows on two paths take max(1, 0.5 x L) = 1 whether they collide (L = 2) or not
    assert ecmp.ecmp_efficiency(2, 2, offered=0.5) == pytest.approx(1.0)
    assert ecmp.ecmp_efficiency(4, 2, offered=2.0) == pytest.approx(2 / (2 * 2.75 * 2 / 4))


def test_asymptotic_mean_meets_the_exact_one() -> None:
    assert 4096 / 64 + math.sqrt(2 * 64 * math.log(64)) == pytest.approx(ecmp.expected_max_load(4096, 64), rel=0.06)


@few
@given(st.integers(1, 40), st.integers(1, 20), st.integers(2, 8))
def test_more_queue_pairs_never_balance_worse(pairs: int, paths: int, factor: int) -> None:
    plain = ecmp.ecmp_efficiency(ecmp.qp_scaled_flows(pairs, factor, hash_queue_pair=False), paths)
    scaled = ecmp.ecmp_efficiency(ecmp.qp_scaled_flows(pairs, factor), paths)
    assert plain == ecmp.ecmp_efficiency(pairs, paths)
    assert scaled >= plain * (1 - 1e-9)


def test_spraying() -> None:
    assert ecmp.spray_efficiency(12, 4, adaptive=True) == 1.0
    assert ecmp.spray_efficiency(13, 4, adaptive=True) == pytest.approx(13 / 16)  # one path has 4 of 13
    assert ecmp.spray_efficiency(3, 3) == pytest.approx(9 / 17)
    assert ecmp.spray_efficiency(100_000, 16) > 0.96


def test_planes_and_failures() -> None:
    assert ecmp.planar_gbps([100, 100, 50, 100], [1, 1, 1, 1]) == 200  # the half plane carries a quarter
    assert ecmp.spread_gbps([100, 100, 50, 100], flows=10**9) == pytest.approx(350, rel=1e-3)
    assert ecmp.remaining_gbps(800, links=16, failed=2) == 700
    assert ecmp.remaining_gbps(800, links=16, failed=2, planes=4, rebalanced=False) == 400  # 2 of the 4 of one plane


def test_window_limit() -> None:
    # one message of 1 MiB per 21 ms: 8.388608 Mb / 0.021 s
    assert loss.window_limit_gbps(1, 1, 2**20, 0.021) == pytest.approx(0.399458, rel=1e-5)
    # NCCLX's defaults with 64 KiB messages: 16 x 128 x 64 KiB = 128 MiB; over 21 ms 51.13 Gb/s
    assert loss.window_limit_gbps(16, 128, 65536, 0.021) == pytest.approx(51.1306, rel=1e-5)
    assert loss.window_needed_bytes(400, 0.021) == pytest.approx(1.05e9)


def test_go_back_n_and_selective_repeat() -> None:
    # 1 Gb/s, packets of 1000 bytes (8 us), RTT 1 ms, 1 % lost: 0.99 / (1 + 0.01 x 125) = 0.44
    each_s = loss.packet_s(1.0, 1000)
    assert each_s == pytest.approx(8e-6)
    assert loss.go_back_n_efficiency(0.01, 1e-3, each_s) == pytest.approx(0.44)
    assert loss.selective_repeat_efficiency(0.01) == pytest.approx(0.99)
    # over 16 queue pairs a loss rewinds one of them: 0.99 / (1 + 0.01 x 125 / 16)
    assert loss.go_back_n_efficiency(0.01, 1e-3, loss.packet_s(1.0, 1000, 16)) == pytest.approx(0.99 / 1.078125)


def test_mathis() -> None:
    # 1460 bytes, 100 ms, 1e-4: 116.8 kb/s x 1.224745 x 100 = 14.305 Mb/s
    assert loss.mathis_gbps(1e-4, 0.1) == pytest.approx(0.01430502, rel=1e-6)
    assert loss.mathis_gbps(1e-4, 0.1, delayed_acks=True) == pytest.approx(0.01430502 / math.sqrt(2), rel=1e-6)


def test_pftk() -> None:
    # b = 2, p = 0.01, RTT 0.1 s, T0 1 s: 0.1 sqrt(0.0133333) = 0.011547; min(1, 3 sqrt(0.0075)) = 0.259808;
    # x 0.01 x 1.0032 = 0.0026064; together 0.0141534 s per segment
    assert loss.pftk_gbps(0.01, 0.1, timeout_s=1.0) == pytest.approx(1460 * 8e-9 / 0.0141534, rel=1e-4)
    # rare loss: the same as Mathis with delayed ACKs
    assert loss.pftk_gbps(1e-8, 0.1) == pytest.approx(float(loss.mathis_gbps(1e-8, 0.1, delayed_acks=True)), rel=1e-3)
    assert loss.pftk_gbps(1e-8, 0.1, window_bytes=125_000) == pytest.approx(0.01)  # 1 Mb per 0.1 s


def test_parallel_tcp_adds_up_to_the_link() -> None:
    one = float(loss.pftk_gbps(1e-5, 0.04))
    assert np.allclose(loss.parallel_tcp_gbps(5.0, [1, 4], 1e-5, 0.04), [one, 4 * one])
    assert loss.parallel_tcp_gbps(5.0, 10_000, 1e-5, 0.04) == 5.0


def test_buffers() -> None:
    # Appenzeller et al.: 10 Gb/s x 250 ms = 2.5 Gb; with 10,000 flows a hundredth of that
    assert loss.buffer_needed_bytes(10, 0.25) * 8 == pytest.approx(2.5e9)
    assert loss.buffer_needed_bytes(10, 0.25, 10_000) * 8 == pytest.approx(2.5e7)
    assert np.allclose(loss.synchronised_utilisation([0.0, 1.0, 3.0]), [0.75, 1.0, 1.0])
    # b = 1/2: windows from 3/4 to 3/2: (7/32 + 5/8) / (1/4 + 5/8) = 27/28
    assert loss.synchronised_utilisation(0.5) == pytest.approx(27 / 28)
    # b = 0.1 and 100 flows: erf(1.83712 x 0.1 x 10 / 1.1) = erf(1.6701) = 0.98183
    assert loss.desynchronised_utilisation(0.1, 100) == pytest.approx(0.98183, abs=1e-4)


def test_priority_classes() -> None:
    assert classes.strict_priority_gbps(100, [30, 90, 10]) == [30, 70, 0]
    assert classes.weighted_classes_gbps(100, [30, 90, 10], [1, 1, 2]) == pytest.approx([30, 60, 10])
    assert classes.weighted_classes_gbps(100, [200, 200], [3, 1]) == pytest.approx([75, 25])
    assert classes.oversubscribed_gbps(400, 2.8) == pytest.approx(142.857, rel=1e-5)
    assert classes.oversubscribed_gbps(400, 2.8, crossing=0.25) == 400


@few
@given(st.lists(st.floats(0, 200), min_size=1, max_size=6), st.data())
def test_weighted_classes_waste_nothing(demands: list[float], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(demands), max_size=len(demands)))
    given_gbps = classes.weighted_classes_gbps(100, demands, weights)
    assert sum(given_gbps) == pytest.approx(min(100, sum(demands)), abs=1e-6)
    assert all(g <= d + 1e-9 for g, d in zip(given_gbps, demands, strict=True))


def test_compression_ratio_and_error() -> None:
    int4 = classes.COMPRESSIONS["int4"]
    assert int4.ratio(32) == pytest.approx(32 / 4.25)
    values = np.random.default_rng(0).normal(size=6400)
    error = np.abs(classes.quantise_int4(values) - values).reshape(-1, 64).max(axis=1)
    largest = np.abs(values).reshape(-1, 64).max(axis=1)
    assert (error <= int4.error_bound() * largest * (1 + 1e-9)).all()
    assert error.max() > 0.9 * int4.error_bound() * largest.min()  # the bound is not idle
    # 1e9 values of 4 bytes: (4 + 0.53125) bytes each way, twice, at 3 TB/s
    assert int4.codec_s(1e9, 3e12) == pytest.approx(2 * 4.53125e9 / 3e12)
    assert classes.COMPRESSIONS["fp8-e4m3"].error_bound(7) == 7 / 16


def test_diloco() -> None:
    # 1e9 parameters, 2 sites, every 100 steps in fp32 at 1 GB/s: 2 x 1/2 x 4 GB = 4 s per 100 steps (+ 2 latencies)
    plain = classes.diloco(1e9, 2, 100, 32, 1e9, 0.01)
    assert (plain.bytes_per_step, plain.peak_bytes) == (4e7, 4e9)
    assert plain.exposed_s_per_step == pytest.approx(0.0402)
    assert plain.changes_algorithm
    # 4 bits in 5 fragments: 0.1 s each; hidden behind a step of 0.2 s, half exposed behind 0.06 s
    hidden = classes.streaming_diloco(1e9, 2, 100, 5, 1, 0.2, 4, 1e9, 0.0)
    assert (hidden.peak_bytes, hidden.exposed_s_per_step) == (1e8, 0.0)
    late = classes.streaming_diloco(1e9, 2, 100, 5, 1, 0.06, 4, 1e9, 0.0)
    assert late.exposed_s_per_step == pytest.approx(0.04 * 5 / 100)


def test_chunked_hierarchical_reduction_overlaps_its_levels() -> None:
    # 4 GPUs at 100 B/s in each of 2 sites, 1 B/s per GPU between: inside 2 x 3/4 x 800 / 100 = 12 s, across
    # 2 x 1/2 x 200 / 1 = 200 s; in 10 pieces 1.2 + 20 + 9 x 20
    tiers = [(4, 100.0, 0.0), (2, 1.0, 0.0)]
    assert chunked_hierarchical_all_reduce_s(tiers, 800, 1) == pytest.approx(212)
    assert chunked_hierarchical_all_reduce_s(tiers, 800, 10) == pytest.approx(201.2)


def test_effective_names_what_limits() -> None:
    long = NetworkLink(gbps=400, rtt_s=0.021, loss=1e-5)
    one = effective(long, Technology())
    assert one.limit == "window"
    assert one.wire_gbps == pytest.approx(51.1306 * (1 - 1e-5), rel=1e-5)
    assert effective(long, Technology(), pairs=64).wire_gbps == pytest.approx(400 * (1 - 1e-5), rel=1e-5)
    rewound = effective(long, Technology(transport="go-back-n"), pairs=64)
    # 1024 queue pairs: 83.9 us between packets of one, 250.3 packets a round trip: 1 / (1 + 0.00250)
    assert rewound.factors["loss"] == pytest.approx(0.99999 / 1.0025033, rel=1e-5)
    assert effective(NetworkLink(gbps=400, rtt_s=0, paths=3), Technology(balancing="ecmp"), 3).limit == "balancing"
    assert effective_gbps(NetworkLink(gbps=100, rtt_s=0), Technology(compression="int4")) == pytest.approx(1600 / 4.25)


def test_tcp_is_held_back_by_window_loss_and_buffer() -> None:
    tcp = Technology(transport="tcp", queue_pairs=4, packet_bytes=1460, messages=1, message_bytes=2**20)
    assert effective(NetworkLink(gbps=10, rtt_s=0.04), tcp).wire_gbps == pytest.approx(4 * 2**20 * 8e-9 / 0.04)
    lossy = effective(NetworkLink(gbps=10, rtt_s=0.04, loss=1e-3), tcp)
    assert lossy.wire_gbps == pytest.approx(4 * float(loss.pftk_gbps(1e-3, 0.04)))
    assert lossy.limit == "loss"
    full = Technology(transport="tcp", queue_pairs=100, packet_bytes=1460, synchronised=True)
    assert effective(NetworkLink(gbps=10, rtt_s=0.04, buffer_bytes=0), full).wire_gbps == pytest.approx(7.5)


@few
@given(
    st.floats(0, 0.2), st.just(0.0) | st.floats(1e-7, 0.1), st.integers(1, 64), st.sampled_from(["go-back-n", "tcp"])
)
def test_no_technology_beats_its_link(p: float, rtt_s: float, pairs: int, transport: str) -> None:
    link = NetworkLink(gbps=100, rtt_s=rtt_s, loss=p, paths=4, failed_paths=1, buffer_bytes=1e6)
    found = effective(link, Technology.model_validate({"transport": transport}), pairs)
    assert 0 < found.wire_gbps <= 75 + 1e-9


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="failed_paths 4"):
        validate(NetworkLink, {"gbps": 1, "rtt_s": 0, "paths": 4, "failed_paths": 4})
    with pytest.raises(ConfigError, match="compression 'zip'"):
        validate(Technology, {"compression": "zip"})
