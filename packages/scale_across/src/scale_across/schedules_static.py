"""The published static schedules, each as a function from numbers of stages, microbatches and chunks to a Schedule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.config import ConfigError
from scale_across.pipeline import Pipeline, greedy
from scale_across.schedule import B, Block, D, F, Schedule, W, loop_devices, wave_devices


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward, then all backward (Huang et al. 2019)."""
    order: list[Block] = [(F, m, 0, 0) for m in range(microbatches)] + [(B, m, 0, 0) for m in range(microbatches)]
    return Schedule.from_orders("gpipe", [order] * stages, range(stages))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021): stage s runs stages - s forwards, then one of each in turn."""
    return Schedule.from_orders(
        "1f1b", [_one_f_one_b(min(stages - 1 - s, microbatches), microbatches) for s in range(stages)], range(stages)
    )


def _one_f_one_b(warm: int, microbatches: int) -> list[Block]:
    order: list[Block] = [(F, m, 0, 0) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [(F, warm + m, 0, 0), (B, m, 0, 0)]
    return order + [(B, m, 0, 0) for m in range(microbatches - warm, microbatches)]


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B, depth first (Narayanan et al. 2021): groups of `stages` microbatches pass chunk by chunk.

    Raises:
        ConfigError: more than one chunk, and the microbatches are no multiple of the stages.
    """
    if chunks > 1 and microbatches % stages:
        raise ConfigError(f"interleaved: {microbatches} microbatches are no multiple of {stages} stages")
    total = microbatches * chunks
    i = np.arange(total)
    group, inside = np.divmod(i, stages * chunks)
    chunk, microbatch = np.divmod(inside, stages)
    microbatch += group * stages
    table_SN4 = np.zeros((stages, 2 * total, 4), np.int32)
    for s in range(stages):
        warm = min(total, 2 * (stages - 1 - s) + (chunks - 1) * stages if chunks > 1 else stages - 1 - s)
        forward = np.where(i < warm, i, 2 * i - warm)  # places: alone at first, then in turn with backward
        backward = np.where(i < total - warm, warm + 2 * i + 1, total + i)
        for place, kind, chunks_of in ((forward, F, chunk), (backward, B, chunks - 1 - chunk)):
            table_SN4[s, place, 0], table_SN4[s, place, 1], table_SN4[s, place, 2] = kind, microbatch, chunks_of
    return Schedule.from_table("interleaved_1f1b" if chunks > 1 else "1f1b", table_SN4, loop_devices(stages, chunks))


def breadth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth-first (Lamy-Poirier 2023): all microbatches through a chunk before the next one; memory of GPipe."""
    order: list[Block] = [(F, m, c, 0) for c in range(chunks) for m in range(microbatches)]
    order += [(B, m, c, 0) for c in reversed(range(chunks)) for m in range(microbatches)]
    return Schedule.from_orders("breadth_first", [order] * stages, loop_devices(stages, chunks))


def _unit_pipeline(stages: int, microbatches: int, devices: list[int], limit: list[int]) -> Pipeline:
    return Pipeline.uniform(devices, stages, microbatches, f_s=1.0, d_s=1.0, w_s=1.0, limit_units_S=limit)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1, "ZB-1p" (Qi et al. 2023): 1F1B with split gradients; stage s puts off s weight gradients.

    All stages hold at most `stages` microbatches. Bubble (stages - 1)(F + D - W).
    """
    orders = [_zero_bubble(stages - s, s, microbatches) for s in range(stages)]
    return Schedule.from_orders("zb_h1", orders, range(stages))


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2, "ZB-2p": nearly twice the memory, 2 stages - 1, and no bubble at F = D = W."""
    orders = [_zero_bubble(2 * (stages - s) - 1, 2 * s, microbatches) for s in range(stages)]
    return Schedule.from_orders("zb_h2", orders, range(stages))


def _zero_bubble(warm: int, put_off: int, microbatches: int) -> list[Block]:
    """`warm` forwards, then D, the W of `put_off` microbatches before, and F, in turn."""
    warm = min(warm, microbatches)
    order: list[Block] = [(F, m, 0, 0) for m in range(warm)]
    for m in range(microbatches):
        order.append((D, m, 0, 0))
        if m >= put_off:
            order.append((W, m - put_off, 0, 0))
        if warm + m < microbatches:
            order.append((F, warm + m, 0, 0))
    return order + [(W, m, 0, 0) for m in range(max(0, microbatches - put_off), microbatches)]


def zb_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024): two chunks in a V, every stage holds at most `stages` microbatches (2 x stages chunks)."""
    pipeline = _unit_pipeline(stages, microbatches, wave_devices(stages, 2), [2 * stages] * stages)
    return greedy(pipeline, "zb_v").schedule


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek, the "cut in half" DualPipe): two chunks in a V, forward and backward of the two in turn.

    Eight phases per stage, as published with DualPipe. Its bubble formula, (stages - 1)(F&B + B - 3 W), counts a paired
    forward and backward as one block F&B whose outputs leave at its end. Here they run one after the other and the
    first output leaves early: (stages - 1)(F + D - W), in block times of a chunk.

    Raises:
        ConfigError: fewer than two microbatches per stage.
    """
    if microbatches < 2 * stages:
        raise ConfigError(f"dualpipe_v: {microbatches} microbatches; at least {2 * stages} for {stages} stages")
    orders = [_dualpipe_v_stage(stages, s, microbatches) for s in range(stages)]
    return Schedule.from_orders("dualpipe_v", orders, wave_devices(stages, 2))


def _dualpipe_v_stage(stages: int, s: int, microbatches: int) -> list[Block]:
    order: list[Block] = []
    count: dict[tuple[int, int], int] = {}
    pending: list[tuple[int, int]] = []

    def add(kind: int, chunk: int, split: bool = False) -> None:
        step = F if kind == F else B
        m = count.get((step, chunk), 0)
        count[step, chunk] = m + 1
        if split:
            order.append((D, m, chunk, 0))
            pending.append((m, chunk))
        else:
            order.append((kind, m, chunk, 0))

    def weight() -> None:
        m, chunk = pending.pop(0)
        order.append((W, m, chunk, 0))

    rest = stages - s - 1
    for _ in range(2 * rest):
        add(F, 0)
    for _ in range(s + 1):
        add(F, 0)
        add(F, 1)
    for _ in range(rest):
        add(B, 1, split=True)
        weight()
        add(F, 1)
    for _ in range(microbatches - 2 * stages + s + 1):
        add(F, 0)
        add(B, 1)
        add(F, 1)
        add(B, 0)
    for _ in range(rest):
        add(B, 1)
        add(F, 1)
        add(B, 0)
    for i in range(s + 1):  # the second half splits its gradients and puts the weights' off
        half = (s + 1) // 2
        add(B, 1, split=i > half or (i == half and s % 2 == 1))
        add(B, 0, split=i >= half)
    for _ in range(rest):
        weight()
        add(B, 0, split=True)
    while pending:
        weight()
    return order


STATIC: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
}


def bubble_share(schedule: Schedule, start_SN: np.ndarray, end_SN: np.ndarray) -> float:
    """Share of the longest stage's span, from its first block to its last, in which it is idle."""
    real = schedule.kind_SN >= 0
    begin = np.where(real, start_SN, np.inf).min(axis=1)
    finish = np.where(real, end_SN, -np.inf).max(axis=1)
    busy = np.where(real, end_SN - start_SN, 0.0).sum(axis=1)
    worst = int(np.argmax(finish - begin))
    return float(1 - busy[worst] / (finish[worst] - begin[worst]))
