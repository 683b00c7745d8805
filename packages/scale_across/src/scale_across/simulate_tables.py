"""From a schedule and the work of a step to the flat arrays of the event kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from scale_across.overlap import OverlapPolicy
from scale_across.schedule import B, D, F, Schedule, W, virtual_of_chunk

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Phase:
    """One leg of a collective."""

    resource: int
    occupied_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """Durations and resources of one step; S stages, V virtual stages (chunks of stages in pipeline order)."""

    duration_KV: Floats
    """Seconds of a block by kind (F, D, W, B) and virtual stage, for a whole microbatch, or slice if there are any."""
    resource_SS: Ints
    """Which resource a message from stage to stage takes."""
    occupied_s_SS: Floats
    """Seconds that the message of one pipeline keeps its resource."""
    latency_s_SS: Floats
    resources: tuple[str, ...]
    """Names, for traces."""
    replicas_R: Ints
    """Pipelines whose messages share the resource (1: its own)."""
    reduce_S: tuple[tuple[Phase, ...], ...] = ()
    """Gradient reduction of one chunk of each stage: legs in order. Empty: none."""
    gather_S: tuple[tuple[Phase, ...], ...] = ()
    """Parameter gather of one chunk of each stage, at the start of a step."""
    optimizer_s: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tables:
    """A schedule, its work and a policy as the flat arrays of the kernel; see `simulate_kernel`."""

    first_S: Ints
    kind_B: npt.NDArray[np.int8]
    microbatch_B: Ints
    virtual_B: Ints
    duration_B: Floats
    depends_B: Ints
    route_B: Ints
    resource_P: Ints
    occupied_s_P: Floats
    latency_s_P: Floats
    replicas_R: Ints
    names_R: tuple[str, ...]
    special_B: Ints
    gate_X: Ints
    trigger_X: Ints
    item_T: Ints
    share_T: Floats
    phase_J: Ints
    resource_H: Ints
    occupied_s_H: Floats
    latency_s_H: Floats
    names_J: tuple[str, ...]
    released_J: npt.NDArray[np.bool_]
    """Collectives that a block releases; the others are ready at the start."""


def build_tables(schedule: Schedule, work: Work, policy: OverlapPolicy) -> Tables:
    """Flatten a schedule: durations, the block that each block waits for, the message that each sends.

    Raises:
        ConfigError: a block's predecessor is not in the schedule.
    """
    real = schedule.kind_SN >= 0
    stage_B = np.nonzero(real)[0].astype(np.int32)
    kind_B = schedule.kind_SN[real]
    microbatch_B = schedule.microbatch_SN[real].astype(np.int32)
    slice_B = schedule.slice_SN[real].astype(np.int32)
    device_V = np.asarray(schedule.device_of_virtual_V, np.int32)
    stages, virtuals = len(schedule.kind_SN), len(device_V)
    virtual_SC = virtual_of_chunk(device_V, stages)
    virtual_B = virtual_SC[stage_B, schedule.chunk_SN[real]]
    depends_B, route_B = _dependencies(kind_B, microbatch_B, slice_B, virtual_B, device_V, stages)
    first_S = np.concatenate([[0], np.cumsum(real.sum(axis=1))]).astype(np.int32)
    duration_B = work.duration_KV[kind_B, virtual_B]
    if work.duration_KV.shape != (4, virtuals):
        raise ConfigError(f"duration_KV has shape {work.duration_KV.shape}; the schedule needs (4, {virtuals})")
    collectives = _collectives(work, policy, first_S, kind_B, virtual_B, device_V)
    together = np.where(work.replicas_R > 1, work.replicas_R / stagger_copies(policy, work), 1.0)
    resource_P = work.resource_SS.ravel().astype(np.int32)
    tables = Tables(
        first_S=first_S,
        kind_B=kind_B,
        microbatch_B=microbatch_B,
        virtual_B=virtual_B,
        duration_B=np.ascontiguousarray(duration_B),
        depends_B=depends_B,
        route_B=route_B,
        resource_P=resource_P,
        occupied_s_P=work.occupied_s_SS.ravel() * together[np.maximum(resource_P, 0)],
        latency_s_P=np.ascontiguousarray(work.latency_s_SS.ravel()),
        replicas_R=work.replicas_R,
        names_R=work.resources,
        **collectives,
    )
    copies = stagger_copies(policy, work)
    return _repeated(tables, copies) if copies > 1 else tables


def stagger_copies(policy: OverlapPolicy, work: Work) -> int:
    """Replicas simulated one by one: as asked for, and no more than share a resource."""
    return int(min(policy.stagger, work.replicas_R.max(initial=1)))


def _dependencies(
    kind_B: npt.NDArray[np.int8], microbatch_B: Ints, slice_B: Ints, virtual_B: Ints, device_V: Ints, stages: int
) -> tuple[Ints, Ints]:
    """(block on another stage whose message a block waits for, or -1; route of the message it sends, or -1)."""
    virtuals, slices = len(device_V), int(slice_B.max(initial=0)) + 1
    microbatches = int(microbatch_B.max(initial=0)) + 1
    unit_B = (slice_B.astype(np.int64) * microbatches + microbatch_B) * virtuals + virtual_B
    depends_B = np.full(len(kind_B), -1, np.int32)
    route_B = np.full(len(kind_B), -1, np.int32)
    for forward in (True, False):
        blocks = np.nonzero(kind_B == F if forward else (kind_B == D) | (kind_B == B))[0]
        step = -1 if forward else 1
        producer = np.full(slices * microbatches * virtuals, -1, np.int32)
        producer[unit_B[blocks]] = blocks
        v = virtual_B[blocks]
        before, after = v + step, v - step
        has = (before >= 0) & (before < virtuals)
        has[has] = device_V[before[has]] != device_V[v[has]]
        source = producer[unit_B[blocks[has]] + step]
        if (source < 0).any():
            at = blocks[has][int(np.argmax(source < 0))]
            raise ConfigError(
                f"schedule: microbatch {microbatch_B[at]} at virtual stage {virtual_B[at]} has no "
                f"{'forward' if forward else 'backward'} block at virtual stage {virtual_B[at] + step}"
            )
        depends_B[blocks[has]] = source
        sends = (after >= 0) & (after < virtuals)
        sends[sends] = device_V[after[sends]] != device_V[v[sends]]
        route_B[blocks[sends]] = device_V[v[sends]] * stages + device_V[after[sends]]
    return depends_B, route_B


def _collectives(
    work: Work,
    policy: OverlapPolicy,
    first_S: Ints,
    kind_B: npt.NDArray[np.int8],
    virtual_B: Ints,
    device_V: Ints,
) -> dict[str, Any]:
    """Reductions after each chunk's last gradient block, gathers before its first forward block."""
    items: list[tuple[str, tuple[Phase, ...], float]] = []  # name, legs, share of the chunk
    gates: dict[int, int] = {}  # block → collective it waits for
    releases: dict[int, list[tuple[int, float]]] = {}  # block → collectives, share of the block before each
    first_V, last_V = np.full((2, len(device_V)), -1)
    forward, gradients = np.flatnonzero(kind_B == F), np.flatnonzero(kind_B >= W)
    first_V[virtual_B[forward[::-1]]] = forward[::-1]  # of equal indices the last assignment stays: the first block
    last_V[virtual_B[gradients]] = gradients
    for s in range(len(first_S) - 1):
        mine = np.flatnonzero(device_V == s).tolist()
        if work.gather_S and work.gather_S[s]:
            in_order = sorted((int(first_V[v]), v) for v in mine if first_V[v] >= 0)
            for place, (block, v) in enumerate(in_order):
                first = _needed_first(work.gather_S[s], float(work.duration_KV[F, v]), policy.buckets)
                gates[block] = len(items)
                for part in (first, 1.0 - first) if first < 1.0 else (1.0,):
                    if policy.prefetch and place >= policy.prefetch:
                        releases.setdefault(in_order[place - policy.prefetch][0], []).append((len(items), 0.0))
                    items.append((f"gather {v}", work.gather_S[s], part))
        if work.reduce_S and work.reduce_S[s]:
            for v in (v for v in mine if last_V[v] >= 0):
                at = int(last_V[v]) if policy.reduce_overlap else int(first_S[s + 1]) - 1
                for k in range(policy.buckets):
                    share = (k + 1) / policy.buckets if policy.reduce_overlap else 1.0
                    releases.setdefault(at, []).append((len(items), share))
                    items.append((f"reduce {v}.{k}", work.reduce_S[s], 1.0 / policy.buckets))
    special = sorted({*gates, *releases})
    special_B = np.full(len(kind_B), -1, np.int32)
    special_B[special] = np.arange(len(special))
    released = [pair for block in special for pair in releases.get(block, [])]
    phases = [(leg.resource, leg.occupied_s * part, leg.latency_s) for _, legs, part in items for leg in legs]
    resource_H, occupied_s_H, latency_s_H = zip(*phases, strict=True) if phases else ((), (), ())
    released_J = np.zeros(len(items), bool)
    released_J[[item for item, _ in released]] = True
    return {
        "special_B": special_B,
        "gate_X": np.array([gates.get(block, -1) for block in special], np.int32),
        "trigger_X": np.concatenate([[0], np.cumsum([len(releases.get(b, [])) for b in special])]).astype(np.int32),
        "item_T": np.array([item for item, _ in released], np.int32),
        "share_T": np.array([share for _, share in released], np.float64),
        "phase_J": np.concatenate([[0], np.cumsum([len(legs) for _, legs, _ in items])]).astype(np.int32),
        "resource_H": np.array(resource_H, np.int32),
        "occupied_s_H": np.array(occupied_s_H, np.float64),
        "latency_s_H": np.array(latency_s_H, np.float64),
        "names_J": tuple(name for name, _, _ in items),
        "released_J": released_J,
    }


def _needed_first(legs: tuple[Phase, ...], forward_s: float, buckets: int) -> float:
    """Share of a chunk's parameters that must be there when its first forward block starts.

    Bucket k of n is needed when (k - 1) / n of the block have run. Gathered without a break in g seconds, all are in
    time if the block starts after the first one, or, when gathering is slower than computing, g - (n - 1) / n of the
    block's time after the beginning.
    """
    gather_s = sum(leg.occupied_s for leg in legs)
    return max(1.0 / buckets, 1.0 - forward_s * (buckets - 1) / (buckets * gather_s)) if gather_s > 0 else 1.0


def _repeated(tables: Tables, copies: int) -> Tables:
    """Copies of the pipeline side by side: resources of one pipeline are repeated, shared ones are not.

    A collective on a shared resource is one for all replicas; each copy carries an equal part of it.
    """
    resources, stages = len(tables.replicas_R), len(tables.first_S) - 1
    blocks, items = len(tables.kind_B), len(tables.phase_J) - 1
    shared = tables.replicas_R > 1

    def tiled(array: npt.NDArray[Any], step: int) -> npt.NDArray[Any]:
        """Indices (kept at -1) moved by `step` per copy."""
        return np.concatenate([np.where(array >= 0, array + copy * step, array) for copy in range(copies)])

    def moved(array: Ints) -> Ints:
        return np.concatenate(
            [np.where(shared[array], array, array + copy * resources).astype(np.int32) for copy in range(copies)]
        )

    def chained(offsets: Ints) -> Ints:
        return np.concatenate([offsets[:1], *(offsets[1:] + copy * int(offsets[-1]) for copy in range(copies))]).astype(
            np.int32
        )

    specials = len(tables.gate_X)
    occupied_s_H = np.where(shared[tables.resource_H], tables.occupied_s_H / copies, tables.occupied_s_H)
    tables = replace(tables, occupied_s_H=occupied_s_H)
    repeat = {
        name: np.tile(getattr(tables, name), copies)
        for name in (
            "kind_B", "microbatch_B", "virtual_B", "duration_B", "occupied_s_P", "latency_s_P", "share_T",
            "occupied_s_H", "latency_s_H", "replicas_R", "released_J",
        )
    }  # fmt: skip
    return replace(
        tables,
        first_S=chained(tables.first_S),
        depends_B=tiled(tables.depends_B, blocks).astype(np.int32),
        route_B=tiled(tables.route_B, stages * stages).astype(np.int32),
        special_B=tiled(tables.special_B, specials).astype(np.int32),
        gate_X=tiled(tables.gate_X, items).astype(np.int32),
        trigger_X=chained(tables.trigger_X),
        item_T=tiled(tables.item_T, items).astype(np.int32),
        phase_J=chained(tables.phase_J),
        resource_P=moved(np.maximum(tables.resource_P, 0)),
        resource_H=moved(tables.resource_H),
        names_R=tables.names_R * copies,
        names_J=tables.names_J * copies,
        **repeat,
    )
