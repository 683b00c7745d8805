"""The event simulation against steps worked by hand, formulas of pipelines, and a plain re-computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from scale_across.overlap import OverlapPolicy
from scale_across.schedule import B, D, F, Schedule, W
from scale_across.simulate import Phase, StepTimeline, Work, simulate

few = settings(max_examples=20, deadline=None)


def order(rows: list[list[tuple[int, int, int]]], device_of_virtual: list[int]) -> Schedule:
    """From one list of (kind, microbatch, chunk) per stage."""
    return Schedule.from_orders("by hand", [[(*block, 0) for block in row] for row in rows], device_of_virtual)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    rows = []
    for s in range(stages):
        warm = min(stages - 1 - s, microbatches)
        row = [(F, m, 0) for m in range(warm)]
        for m in range(microbatches - warm):
            row += [(F, warm + m, 0), (B, m, 0)]
        rows.append(row + [(B, m, 0) for m in range(microbatches - warm, microbatches)])
    return order(rows, list(range(stages)))


def work(stages: int, times: tuple[float, float, float, float], **more: Any) -> Work:
    """Every route a resource of its own, nothing to send."""
    shape = (stages, stages)
    values: dict[str, Any] = {
        "duration_KV": np.tile(np.array(times)[:, None], (1, stages)),
        "resource_SS": np.arange(stages * stages, dtype=np.int32).reshape(shape),
        "occupied_s_SS": np.zeros(shape),
        "latency_s_SS": np.zeros(shape),
        "resources": tuple(f"{a}→{b}" for a in range(stages) for b in range(stages)),
        "replicas_R": np.ones(stages * stages, np.int32),
    }
    return Work(**{**values, **more})


@pytest.mark.parametrize(("stages", "microbatches", "idle"), [(8, 24, 0.2258), (16, 48, 0.2381)])
def test_1f1b_bubble_equals_the_published_value(stages: int, microbatches: int, idle: float) -> None:
    """F = B = W = 1, no communication (zero-bubble paper, table of 1F1B): (p - 1) / (m + p - 1)."""
    found = simulate(one_f_one_b(stages, microbatches), work(stages, (1, 1, 1, 2)))
    assert found.step_s == 3 * (microbatches + stages - 1)
    assert found.bubble == pytest.approx(idle, abs=5e-5)


def test_messages_by_hand() -> None:
    """Two stages, one microbatch, F 1, B 2, message 0.5 + latency 0.25: 1 + .75 + 1 + 2 + .75 + 2."""
    slow = work(2, (1, 1, 1, 2), occupied_s_SS=np.full((2, 2), 0.5), latency_s_SS=np.full((2, 2), 0.25))
    found = simulate(one_f_one_b(2, 1), slow)
    assert found.step_s == 7.5
    assert found.sent_B.tolist() == [1.0, -1.0, -1.0, 4.75]  # F on stage 0; F and B on stage 1: B sends
    assert found.busy_s_R.sum() == 1.0


def test_messages_queue_on_their_resource() -> None:
    """GPipe: the forward messages of 3 microbatches take 2 s each, so stage 1 runs F at 3, 5 and 7."""
    rows = [[(F, m, 0) for m in range(3)] + [(B, m, 0) for m in range(3)]] * 2
    slow = work(2, (1, 1, 1, 1), occupied_s_SS=np.array([[0, 2], [0, 0]]))
    found = simulate(order(rows, [0, 1]), slow)
    assert found.start_B[6:9].tolist() == [3, 5, 7]
    assert simulate(order(rows, [0, 1]), slow, OverlapPolicy(send_exposed=1.0)).start_B[:3].tolist() == [0, 3, 6]


def test_two_senders_share_a_link_in_order_of_time() -> None:
    """Stages 0 and 1 both send over one link: stage 1's message is ready at 2, stage 0's second one at 2 as well."""
    shared = work(3, (1, 1, 1, 1), occupied_s_SS=np.full((3, 3), 1.0), resource_SS=np.zeros((3, 3), np.int32))
    shared = replace(shared, replicas_R=np.ones(1, np.int32), resources=("link",))
    found = simulate(order([[(F, 0, 0), (F, 1, 0)], [(F, 0, 0), (F, 1, 0)], [(F, 0, 0), (F, 1, 0)]], [0, 1, 2]), shared)
    starts = sorted(found.sent_B[found.sent_B >= 0].tolist())
    assert starts == [1, 2, 3, 4]  # never two at once, never idle with one waiting


def test_a_late_receive_waits_for_its_receiver() -> None:
    """Stage 1 computes until 3 before it asks for its input, so the message of 1 s starts at 3, not at 1."""
    rows = [[(F, 0, 0)], [(W, 0, 0), (F, 0, 0)]]
    busy = work(2, (1, 1, 3, 1), occupied_s_SS=np.full((2, 2), 1.0))
    assert simulate(order(rows, [0, 1]), busy).start_B[2] == 3
    assert simulate(order(rows, [0, 1]), busy, OverlapPolicy(early_receive=False)).start_B[2] == 4


def with_collectives(**more: Any) -> Work:
    """One stage, resource 0 inside the site and 1 across."""
    inside, across = Phase(0, 1.0), Phase(1, 4.0, 0.5)
    base = work(1, (2, 2, 2, 4), resources=("inside", "across"), replicas_R=np.ones(2, np.int32))
    return replace(base, reduce_S=((inside, across),), gather_S=((Phase(0, 3.0),),), optimizer_s=0.25, **more)


def test_gathers_gate_and_reductions_follow() -> None:
    """Gather 3, F and B of one microbatch 6, reduction 1 + 4 + 0.5, optimizer 0.25."""
    found = simulate(order([[(F, 0, 0), (B, 0, 0)]], [0]), with_collectives())
    assert found.step_s == pytest.approx(3 + 6 + 5.5 + 0.25)
    assert found.parts() == pytest.approx(
        {"compute_s": 6, "gather_s": 3, "idle_s": 0, "reduce_s": 5.5, "optimizer_s": 0.25}
    )


@pytest.mark.parametrize(("gather_s", "start_s"), [(4.0, 3.0), (1.0, 0.5), (2.0, 1.0)])
def test_parameters_are_needed_bucket_by_bucket(gather_s: float, start_s: float) -> None:
    """Two buckets, F 2 s: the second is needed 1 s into the block, so F starts at max(g / 2, g - 1)."""
    base = replace(with_collectives(), gather_S=((Phase(0, gather_s),),), reduce_S=())
    found = simulate(order([[(F, 0, 0), (B, 0, 0)]], [0]), base, OverlapPolicy(buckets=2))
    assert found.start_B[0] == pytest.approx(start_s)
    assert found.end_H.max() == gather_s


def test_buckets_leave_during_the_last_block_and_pipeline() -> None:
    """Four buckets of 0.25 + 1 s leave at 3, 4, 5, 6 (B runs from 2 to 6): across from 3.25, then back to back."""
    base = replace(with_collectives(), gather_S=())
    schedule = order([[(F, 0, 0), (B, 0, 0)]], [0])
    found = simulate(schedule, base, OverlapPolicy(buckets=4))
    assert found.begin_H[found.tables.resource_H == 1].tolist() == [3.25, 4.25, 5.25, 6.25]
    assert found.step_s == pytest.approx(7.25 + 0.5 + 0.25)
    late = simulate(schedule, base, OverlapPolicy(buckets=4, reduce_overlap=False))
    assert late.begin_H[late.tables.resource_H == 1].tolist() == [6.25, 7.25, 8.25, 9.25]


def test_prefetch_depth_holds_gathers_back() -> None:
    """Three chunks on one stage, F 2, gathers 1 + 1 latency: with one ahead, each leaves when the chunk before runs."""
    base = replace(with_collectives(), duration_KV=np.full((4, 3), 2.0), gather_S=((Phase(0, 1.0, 1.0),),), reduce_S=())
    chunks = order([[(F, 0, 0), (F, 0, 1), (F, 0, 2), (B, 0, 2), (B, 0, 1), (B, 0, 0)]], [0, 0, 0])
    assert simulate(chunks, base).begin_H.tolist() == [0, 1, 2]
    assert simulate(chunks, base, OverlapPolicy(prefetch=1)).begin_H.tolist() == [0, 2, 4]
    assert simulate(chunks, base, OverlapPolicy(prefetch=2)).begin_H.tolist() == [0, 1, 2]
    assert simulate(chunks, base, OverlapPolicy(prefetch=1)).start_B[:3].tolist() == [2, 4, 6]


def test_priority_lets_messages_pass_collectives() -> None:
    """Ten buckets of 1 s are ready from 0.1 to 1.0 on a link; the messages of 0.5 s are ready at 2 and 3.

    In order of readiness they start at 10.1 and 10.6. With priority they interrupt: 2.0 and 3.0, and the bucket that
    began at 1.1 ends at 2.6, the next at 4.1.
    """
    schedule = order([[(B, 0, 0), (F, 0, 1), (F, 1, 1)], [(F, 0, 0), (F, 1, 0)]], [0, 0, 1])
    base = work(2, (1, 1, 1, 1), occupied_s_SS=np.full((2, 2), 0.5), resource_SS=np.zeros((2, 2), np.int32))
    base = replace(base, duration_KV=np.ones((4, 3)), resources=("link",), replicas_R=np.ones(1, np.int32))
    base = replace(base, reduce_S=((Phase(0, 10.0),), ()))
    fair = simulate(schedule, base, OverlapPolicy(buckets=10, pipeline_priority=False))
    assert fair.sent_B[1:3] == pytest.approx([10.1, 10.6])
    urgent = simulate(schedule, base, OverlapPolicy(buckets=10))
    assert urgent.sent_B[1:3] == pytest.approx([2.0, 3.0])
    assert urgent.end_H[:4] == pytest.approx([1.1, 2.6, 4.1, 5.1])
    assert urgent.step_s == pytest.approx(11.1)  # 10 s of buckets and 1 s of messages, from 0.1 on


def test_a_v_shape_turns_without_a_message() -> None:
    """Chunks on devices 0, 1, 1, 0; F = D = W = 1 and messages of 1 s.

    F0 0-1, message, F1 2-3, F2 3-4, message, F3 5-6, D3 6-7, message, D2 8-9, D1 9-10, message, D0 11-12; the weight
    gradients fill gaps: W3 7-8 on device 0, W2 and W1 behind D1, W0 at the end.
    """
    v_shape = order(
        [
            [(F, 0, 0), (F, 0, 1), (D, 0, 1), (W, 0, 1), (D, 0, 0), (W, 0, 0)],
            [(F, 0, 0), (F, 0, 1), (D, 0, 1), (D, 0, 0), (W, 0, 1), (W, 0, 0)],
        ],
        [0, 1, 1, 0],
    )
    base = replace(work(2, (1, 1, 1, 2), occupied_s_SS=np.ones((2, 2))), duration_KV=np.ones((4, 4)))
    found = simulate(v_shape, base)
    assert found.start_B.tolist() == [0, 5, 6, 7, 11, 12, 2, 3, 8, 9, 10, 11]
    assert (found.sent_B >= 0).sum() == 4


def test_slices_go_forward_in_order_and_back_in_reverse() -> None:
    """Two slices of one microbatch over two stages, blocks and messages of 1 s: transmission and compute overlap."""
    rows = [[(F, 0, 0), (F, 0, 0), (D, 0, 0), (D, 0, 0)]] * 2
    sliced = replace(order(rows, [0, 1]), slice_SN=np.array([[0, 1, 1, 0]] * 2, np.int16))
    found = simulate(sliced, work(2, (1, 1, 1, 2), occupied_s_SS=np.ones((2, 2))))
    assert found.start_B.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_a_schedule_with_a_hole_is_refused() -> None:
    with pytest.raises(ConfigError, match="microbatch 1 at virtual stage 1 has no forward block at virtual stage 0"):
        simulate(order([[(F, 0, 0)], [(F, 0, 0), (F, 1, 0)]], [0, 1]), work(2, (1, 1, 1, 1)))


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    rows = [[(B, 0, 0), (F, 0, 0)], [(F, 0, 0), (B, 0, 0)]]
    with pytest.raises(ConfigError, match="only 0 of 4 blocks can run"):
        simulate(order(rows, [0, 1]), work(2, (1, 1, 1, 1)))


def replicas(count: int, stagger: int) -> StepTimeline:
    """Four stages, the middle boundary a link that `count` pipelines share, 0.25 s per message."""
    occupied = np.zeros((4, 4))
    occupied[1, 2] = occupied[2, 1] = 0.25
    shared = np.ones(16, np.int32)
    shared[[6, 9]] = count
    base = work(4, (1, 1, 1, 2), occupied_s_SS=occupied, replicas_R=shared)
    return simulate(one_f_one_b(4, 8), base, OverlapPolicy(stagger=stagger))


def test_replicas_that_take_turns() -> None:
    """Together every message takes n x 0.25 s. In turns each message takes 0.25 s."""
    assert replicas(1, 1).step_s < replicas(4, 4).step_s < replicas(4, 1).step_s
    alone, turns = replicas(1, 1), replicas(4, 4)
    first = turns.end_B[turns.tables.first_S[1] - 1]
    assert first >= alone.step_s
    assert len(turns.tables.first_S) == 17


def slow_model(schedule: Schedule, w: Work) -> dict[tuple[int, int], float]:
    """Start of every block by (stage, place), by repeated relaxation over plain loops; no queues on resources."""
    stage_of = schedule.device_of_virtual_V.tolist()
    last = len(stage_of) - 1
    chunk_of = {(s, c): v for s in set(stage_of) for c, v in enumerate(v for v, d in enumerate(stage_of) if d == s)}
    where: dict[tuple[bool, int, int], tuple[int, int]] = {}
    for s, n in np.argwhere(schedule.kind_SN >= 0).tolist():
        v = chunk_of[s, int(schedule.chunk_SN[s, n])]
        where[schedule.kind_SN[s, n] == F, int(schedule.microbatch_SN[s, n]), v] = (s, n)
    starts = dict.fromkeys(where.values(), 0.0)

    def end(at: tuple[int, int]) -> float:
        s, n = at
        return starts[at] + float(w.duration_KV[schedule.kind_SN[s, n], chunk_of[s, int(schedule.chunk_SN[s, n])]])

    for _ in range(len(starts)):
        for (forward, m, v), at in where.items():
            before = [end((at[0], at[1] - 1))] if at[1] else []
            source = v - 1 if forward else v + 1
            if 0 <= source <= last:
                from_s, to_s = stage_of[source], stage_of[v]
                travel = w.occupied_s_SS[from_s, to_s] + w.latency_s_SS[from_s, to_s] if from_s != to_s else 0.0
                before.append(end(where[forward, m, source]) + travel)
            starts[at] = max([0.0, *before])
    return starts


@few
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_both_kernels_agree_with_a_plain_model(stages: int, microbatches: int, seed: int) -> None:
    """Messages shorter than blocks never queue, so a model without queues gives the same starts."""
    rng = np.random.default_rng(seed)
    w = work(stages, (1, 1, 1, 2), latency_s_SS=rng.uniform(0, 3, (stages, stages)))
    w = replace(w, duration_KV=rng.uniform(1, 3, (4, stages)), occupied_s_SS=rng.uniform(0, 1, (stages, stages)))
    schedule = one_f_one_b(stages, microbatches)
    fixed = simulate(schedule, w)
    events = simulate(schedule, replace(w, reduce_S=((Phase(0, 0.0),),) * stages))
    assert np.allclose(fixed.start_B, events.start_B)
    assert np.allclose(fixed.start_B, [t for _, t in sorted(slow_model(schedule, w).items())])
