"""Pipeline schedules: published bubbles exactly, the validator, the independent checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.config import ConfigError
from scale_across.pipeline import Pipeline, greedy, run
from scale_across.schedule import (
    B,
    D,
    F,
    Schedule,
    W,
    check_timeline,
    local_v_devices,
    loop_devices,
    peak_memory,
    validate,
    wave_devices,
)
from scale_across.schedules_static import (
    STATIC,
    breadth_first,
    bubble_share,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)


def unit(schedule: Schedule, f_s: float = 1.0, d_s: float = 1.0, w_s: float = 1.0) -> Pipeline:
    """No links, no memory limit."""
    devices = schedule.device_of_virtual_V.tolist()
    limit = [10**6] * schedule.stages
    return Pipeline.uniform(
        devices, schedule.stages, schedule.microbatches, f_s=f_s, d_s=d_s, w_s=w_s, limit_units_S=limit
    )


def bubble(schedule: Schedule) -> float:
    done = run(schedule, unit(schedule))
    check_timeline(schedule, done.start_SN, done.end_SN - done.start_SN)
    return bubble_share(schedule, done.start_SN, done.end_SN)


@pytest.mark.parametrize(
    ("make", "stages", "microbatches", "share"),
    [
        (one_f_one_b, 8, 24, 0.2258),
        (zb_h1, 8, 24, 0.0886),
        (zb_h2, 8, 24, 0.0),
        (one_f_one_b, 16, 48, 0.2381),
        (zb_h1, 16, 48, 0.0943),
        (zb_h2, 16, 48, 0.0),
    ],
)
def test_zero_bubble_check_values(make: object, stages: int, microbatches: int, share: float) -> None:
    """Qi et al. 2023 at F = B = W = 1: idle share of the longest stage."""
    assert bubble(make(stages, microbatches)) == pytest.approx(share, abs=5e-5)  # type: ignore[operator]


def test_bubbles_follow_their_formulas_at_unequal_times() -> None:
    """1F1B: (P-1)(F+D+W); ZB-H1: (P-1)(F+D-W); interleaved: (P-1)(F+D+W)/chunks."""
    f_s, d_s, w_s, p, m = 1.0, 1.25, 0.5, 6, 24
    work = m * (f_s + d_s + w_s)
    for schedule, idle_s in (
        (one_f_one_b(p, m), (p - 1) * (f_s + d_s + w_s)),
        (gpipe(p, m), (p - 1) * (f_s + d_s + w_s)),
        (zb_h1(p, m), (p - 1) * (f_s + d_s - w_s)),
        (interleaved(p, m, 4), (p - 1) * (f_s + d_s + w_s) / 4),
        (breadth_first(p, m, 4), (p - 1) * (f_s + d_s + w_s) / 4),
    ):
        assert run(schedule, unit(schedule, f_s, d_s, w_s)).makespan_s == pytest.approx(work + idle_s)


def test_dualpipe_v_idles_less_than_its_formula_with_paired_blocks() -> None:
    """By chunk: ours (P-1)(F+D-W); the formula (P-1)(F&B + B - 3W), with F&B = F + B, is (P-1)(F + 2D - W)."""
    f_s, d_s, w_s, p, m = 1.0, 1.25, 0.75, 4, 20
    schedule = dualpipe_v(p, m)
    validate(schedule, memory_limit=p + 0.5)
    idle_s = run(schedule, unit(schedule, 2 * f_s, 2 * d_s, 2 * w_s)).makespan_s - 2 * m * (f_s + d_s + w_s)
    assert idle_s == pytest.approx((p - 1) * (f_s + d_s - w_s))
    with pytest.raises(ConfigError, match="3 microbatches; at least 8 for 4 stages"):
        dualpipe_v(4, 3)


def test_memory_is_what_the_schedules_promise() -> None:
    assert peak_memory(gpipe(4, 8)).tolist() == [8, 8, 8, 8]
    assert peak_memory(one_f_one_b(4, 8)).tolist() == [4, 3, 2, 1]
    assert peak_memory(zb_h1(4, 8)).max() == 4
    assert peak_memory(zb_h2(4, 8)).max() == 7
    assert peak_memory(zb_v(4, 8)).max() <= 4
    # interleaved: pp x chunks + pp - 1 chunks on the first stage
    assert peak_memory(interleaved(4, 16, 2))[0] == pytest.approx((4 * 2 + 4 - 1) / 2)


@pytest.mark.parametrize("name", sorted(STATIC))
def test_every_static_schedule_is_valid_for_few_and_for_many_microbatches(name: str) -> None:
    for microbatches in (1, 3, 17):
        validate(STATIC[name](4, microbatches))


def test_devices_of_virtual_stages() -> None:
    assert loop_devices(3, 2) == [0, 1, 2, 0, 1, 2]
    assert wave_devices(3, 2) == [0, 1, 2, 2, 1, 0]
    assert local_v_devices(4, 2) == [0, 1, 1, 0, 2, 3, 3, 2]


def broken(change: str) -> Schedule:
    orders = one_f_one_b(3, 4).orders()
    if change == "missing":
        orders[1].pop()
    elif change == "twice":
        orders[1].append((F, 0, 0, 0))
    elif change == "circular":
        orders[2] = sorted(orders[2], key=lambda block: -block[0])
    return Schedule.from_orders(change, orders, range(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "D of microbatch 3, slice 0 on virtual stage 1 is there 0 times"),
        ("twice", "F of microbatch 0, slice 0 on virtual stage 1 is there 2 times"),
        ("circular", "stage 0 waits for ever at place 3: B of microbatch 0"),
    ],
)
def test_the_validator_names_what_is_wrong(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(broken(change))
    with pytest.raises(ConfigError, match="stage 0 holds 8 microbatches of activations; the limit is 4"):
        validate(gpipe(2, 8), memory_limit=4)


def test_the_checker_sees_overlap_and_haste() -> None:
    schedule = zb_h1(3, 6)
    done = run(schedule, unit(schedule))
    length_SN = done.end_SN - done.start_SN
    check_timeline(schedule, done.start_SN, length_SN)
    with pytest.raises(ConfigError, match="starts before the one before it ends"):
        check_timeline(schedule, done.start_SN, length_SN * 1.5)
    early = done.start_SN.copy()
    early[1, 0] = 0.0  # stage 1 forwards what stage 0 has not sent
    with pytest.raises(ConfigError, match="arrives"):
        check_timeline(schedule, early, length_SN)


def test_rendezvous_waits_for_the_receiver_and_asynchronous_sends_do_not() -> None:
    """2 stages, 2 microbatches, a link of 1 s: by hand, F = D = W = 1.

    Asynchronous: F1 arrives at 3 while stage 1 still computes; rendezvous: its transfer starts when D0 has ended there.
    """
    orders = [
        [(F, 0, 0, 0), (F, 1, 0, 0), (B, 0, 0, 0), (B, 1, 0, 0)],
        [(F, 0, 0, 0), (B, 0, 0, 0), (F, 1, 0, 0), (B, 1, 0, 0)],
    ]
    schedule = Schedule.from_orders("1f1b", orders, range(2))
    pipeline = replace(unit(schedule), link_V=np.array([0, -1], np.int32), occupied_s=1.0)
    eager, meeting = run(schedule, pipeline), run(schedule, pipeline, rendezvous=True)
    assert eager.start_SN[1].tolist() == [2, 3, 5, 6]
    assert meeting.start_SN[1].tolist() == [2, 3, 6, 7]


def test_sliced_microbatches_go_forward_in_order_and_backward_in_reverse() -> None:
    pipeline = Pipeline.uniform([0, 1], 2, 2, f_s=1, d_s=1, w_s=1, limit_units_S=[8, 8], slices=2)
    found = greedy(pipeline, "sliced")
    validate(found.schedule, memory_limit=4)
    check_timeline(found.schedule, found.start_SN, found.end_SN - found.start_SN)
    last = found.schedule.orders()[1]
    assert [block[3] for block in last if block[0] == F] == [0, 1, 0, 1]
    assert [block[3] for block in last if block[0] == D] == [1, 0, 1, 0]
    assert sum(1 for block in last if block[0] == W) == 4
