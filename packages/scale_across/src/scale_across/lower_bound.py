"""A lower bound on the simulated step of one plan under a family of schedules, and the memory that it needs.

For a stage: the parameters that the first block waits for, the forward blocks before it, all of its own blocks, and for
schedules that do not split gradients the backward blocks after it; the reductions, which can start only when a chunk has
seen every microbatch; and the rounds that memory allows: with h microbatches under way at most, a step takes ceil(m / h)
round trips. Each of these holds for every order of blocks in the family, so their maximum does. Times of blocks and
collectives are those of the simulation (`blocks.py`). Messages inside a site count as instant, those between sites take
the time of the fastest hop.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scale_across.blocks import (
    BlockTime,
    block_s,
    edges_s,
    gather_leg,
    reduce_leg,
    sharding_s,
)
from scale_across.collectives import Tiers
from scale_across.compute import GpuNumbers, Kinds, StackNumbers
from scale_across.jit import formula
from scale_across.memory import FRAGMENTATION, held_microbatch_layers
from scale_across.parallelism import Parallelism
from scale_across.step import JobNumbers, LayerTime, ModelNumbers, average_layer, estimate_layers
from scale_across.traffic import split_layers

LOOP, WAVE, LOCAL = 0, 1, 2
"""Which device holds the virtual stages: round and round, to and fro, or to and fro inside each site."""


class Family(NamedTuple):
    """What the bound must know of a schedule. Relaxed: a family that holds several, each no faster."""

    split: int
    """1: input and weight gradients are blocks of their own."""
    devices: int
    """LOOP, WAVE or LOCAL."""
    slices: float
    price: float
    """How much longer blocks take because of slices."""
    held: float
    """Chunk-microbatches whose activations the fullest stage holds; 0: those of (interleaved) 1F1B."""
    first_held: float
    """Microbatches under way at the first stage at most; 0: unknown."""
    last_held: float
    """The same at the last stage of the last site but one, over the number of stages behind it plus one; 0: unknown."""


class Far(NamedTuple):
    """The fastest hop between sites."""

    sites: float
    """Over which the pipeline runs; 1: none."""
    bytes_per_s: float
    latency_s: float
    last_stages: float
    """Stages at the last site."""


class Bound(NamedTuple):
    """What the search needs of a row."""

    bound_s: float
    memory_bytes: float
    estimate_s: float
    """Of (interleaved) 1F1B by the closed form, for the order of the search."""


class _Reduction(NamedTuple):
    total_s: float
    """On the busiest stream, all chunks."""
    item_s: float
    """The last bucket of a chunk, latency included."""
    latency_s: float


@formula
def lower_bound_row(
    plan: Parallelism,
    family: Family,
    far: Far,
    kinds_KF: Kinds,
    model: ModelNumbers,
    gpu: GpuNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
) -> Bound:
    """One row; see the module's text."""
    pp, chunks = float(plan.pp), float(plan.chunks)
    layer = average_layer(plan, kinds_KF, model, gpu, stack, tiers_TF, job)
    estimate = estimate_layers(plan, layer, model, gpu, stack, tiers_TF, job)
    microbatches = job.global_batch / (float(plan.dp) * plan.microbatch)
    stages = split_layers(model.layers, pp, chunks)
    per_chunk = stages.per_chunk if plan.pp > 1 else model.layers / chunks
    sharding = sharding_s(plan, stack, layer, tiers_TF, job)
    embed_s, vocab_s = edges_s(plan, model, gpu, stack, job)
    longer = 1.0 + family.price
    if plan.pp == 1:
        only = block_s(plan, stack, layer, sharding, model.layers, embed_s + vocab_s, 1.0)
        first = middle = last = BlockTime(only.forward_s * longer, only.backward_s * longer)
    else:
        a = block_s(plan, stack, layer, sharding, per_chunk - (stages.middle - stages.first), embed_s, 0.0)
        b = block_s(plan, stack, layer, sharding, per_chunk, 0.0, 0.0)
        c = block_s(plan, stack, layer, sharding, per_chunk - (stages.middle - stages.last), vocab_s, 1.0)
        first = BlockTime(a.forward_s * longer, a.backward_s * longer)
        middle = BlockTime(b.forward_s * longer, b.backward_s * longer)
        last = BlockTime(c.forward_s * longer, c.backward_s * longer)
    compute_s = _pipeline_s(plan, family, far, first, middle, last, microbatches, layer, model, stack, job)
    reduce_s = _reduce_s(plan, family, first, middle, last, microbatches, layer, model, stack, tiers_TF, job, per_chunk)
    wait_s = _gather_wait_s(plan, first, layer, model, stack, tiers_TF, job, per_chunk)
    bound_s = wait_s + max(compute_s, reduce_s) + estimate.optimizer_s
    memory = estimate.memory_bytes
    if family.held > 0 and plan.pp > 1:
        unit = per_chunk * layer.activation_bytes * (1.0 + FRAGMENTATION)
        held = held_microbatch_layers(stages.per_chunk, pp, chunks, microbatches) / per_chunk
        memory += (family.held - held) * unit
    return Bound(bound_s, memory, estimate.total_s)


@formula
def _device_s(family: Family, chunks: float, which: int, first: BlockTime, middle: BlockTime, last: BlockTime) -> float:
    """Seconds of one microbatch on the first (0), a middle (1) or the last (2) device."""
    middle_s = middle.forward_s + middle.backward_s
    first_s = first.forward_s + first.backward_s
    last_s = last.forward_s + last.backward_s
    if which == 1:
        return chunks * middle_s
    if family.devices == 1:
        return first_s + last_s + (chunks - 2.0) * middle_s if which == 0 else chunks * middle_s
    if which == 0:
        return first_s + (chunks - 1.0) * middle_s
    return last_s + (chunks - 1.0) * middle_s if family.devices == 0 else chunks * middle_s


@formula
def _pipeline_s(
    plan: Parallelism,
    family: Family,
    far: Far,
    first: BlockTime,
    middle: BlockTime,
    last: BlockTime,
    microbatches: float,
    layer: LayerTime,
    model: ModelNumbers,
    stack: StackNumbers,
    job: JobNumbers,
) -> float:
    """From the first block to the last one of the step."""
    pp, chunks, n = float(plan.pp), float(plan.chunks), family.slices
    if plan.pp == 1:
        return microbatches * (first.forward_s + first.backward_s)
    hop_s = wire_s = 0.0
    if far.sites > 1.0:
        split = plan.tp if stack.scatter_gather > 0 or plan.sp > 0 else 1
        message = plan.microbatch * job.seq / plan.cp * model.hidden * 2.0 / split
        wire_s = message / far.bytes_per_s
        hop_s = wire_s / n + far.latency_s
    crossings = far.sites - 1.0
    inner = pp - 2.0
    fill_s = (first.forward_s + inner * middle.forward_s) / n + crossings * hop_s
    drain_s = 0.0 if family.split == 1 else first.backward_s + inner * middle.backward_s + crossings * hop_s
    total_s = max(
        microbatches * _device_s(family, chunks, 0, first, middle, last),
        fill_s + microbatches * _device_s(family, chunks, 2, first, middle, last) + drain_s,
    )
    if plan.pp > 2:
        before_s = fill_s - middle.forward_s / n - (hop_s if far.last_stages < 2.0 else 0.0)
        after_s = 0.0
        if family.split == 0:
            after_s = drain_s - middle.backward_s - (hop_s if far.last_stages < 2.0 else 0.0)
        total_s = max(total_s, before_s + microbatches * _device_s(family, chunks, 1, first, middle, last) + after_s)
    total_s = max(total_s, microbatches * chunks * wire_s if family.devices < 2 else microbatches * wire_s)
    weight = layer.weight_share if family.split == 1 else 0.0
    back = 1.0 - weight
    if family.first_held > 0 and plan.chunks == 1:
        around_s = (
            first.forward_s + back * first.backward_s + inner * (middle.forward_s + back * middle.backward_s)
        ) / n
        around_s += (last.forward_s + back * last.backward_s) / n + 2.0 * crossings * hop_s
        total_s = max(total_s, math.ceil(microbatches / family.first_held - 1e-9) * around_s)
    if family.last_held > 0 and plan.chunks == 1 and far.sites > 1.0:
        behind = far.last_stages
        around_s = (
            behind * (middle.forward_s + back * middle.backward_s) + last.forward_s + back * last.backward_s
        ) / n
        allowed = family.last_held * (behind + 1.0) - (1.0 if family.last_held > 1.0 else 0.0)
        total_s = max(total_s, math.ceil(microbatches / allowed - 1e-9) * (around_s + 2.0 * hop_s))
    return total_s


@formula
def _buckets(plan: Parallelism, stack: StackNumbers, per_chunk: float) -> float:
    """Pieces in which a chunk is reduced, as `simulate_input.policy_of` sets them."""
    return max(1.0, math.floor(per_chunk)) if stack.dp_overlap > 0 else 1.0


@formula
def _reduction(
    plan: Parallelism,
    stack: StackNumbers,
    layer: LayerTime,
    tiers_TF: Tiers,
    job: JobNumbers,
    per_chunk: float,
    extra: float,
) -> _Reduction:
    """What one stage sends after its gradients are known; `extra` dense parameters per chunk."""
    buckets = _buckets(plan, stack, per_chunk)
    busiest_s = item_s = latency_s = 0.0
    for tier in range(len(tiers_TF)):
        here_s = here_latency_s = 0.0
        for expert in range(2):
            scatter, outer = reduce_leg(plan, stack, layer, tiers_TF, expert, per_chunk, extra)
            gather = gather_leg(plan, stack, layer, tiers_TF, job, expert, per_chunk, extra)
            if tier == 0:
                item_s += (
                    scatter.occupied_s / buckets + scatter.latency_s + outer.occupied_s / buckets + outer.latency_s
                )
                if plan.zero == 0:
                    item_s += gather.occupied_s / buckets + gather.latency_s
            if scatter.tier == tier:
                here_s += scatter.occupied_s
                here_latency_s = max(here_latency_s, scatter.latency_s)
            if outer.tier == tier:
                here_s += outer.occupied_s
            if plan.zero == 0 and gather.tier == tier:
                here_s += gather.occupied_s
        if here_s > busiest_s:
            busiest_s, latency_s = here_s, here_latency_s
    return _Reduction(busiest_s * plan.chunks, item_s, latency_s)


@formula
def _reduce_s(
    plan: Parallelism,
    family: Family,
    first: BlockTime,
    middle: BlockTime,
    last: BlockTime,
    microbatches: float,
    layer: LayerTime,
    model: ModelNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
    per_chunk: float,
) -> float:
    """From the first block to the end of the reductions of the first and the last device."""
    if plan.zero == 3 or plan.dp * plan.cp <= 1:
        return 0.0
    chunks, n, pp = float(plan.chunks), family.slices, float(plan.pp)
    buckets = _buckets(plan, stack, per_chunk)
    worst_s = 0.0
    for which in range(0, 3, 2):
        edge = model.embedding_params if which == 0 else model.head_params
        if family.devices > 0:
            edge = 0.0
        if plan.pp == 1:
            edge = model.embedding_params + model.head_params
        sent = _reduction(plan, stack, layer, tiers_TF, job, per_chunk, edge / plan.tp / chunks)
        fill_s = (first.forward_s + (pp - 2.0) * middle.forward_s) / n if which == 2 and plan.pp > 1 else 0.0
        device_s = microbatches * _device_s(family, chunks, which, first, middle, last)
        if plan.pp == 1:
            device_s = microbatches * (first.forward_s + first.backward_s)
        ends_s = fill_s + device_s
        own = first if which == 0 else last
        chunk_s = own.forward_s + own.backward_s
        block_backward_s = own.backward_s / n
        if plan.chunks > 1 or family.devices > 0:
            chunk_s = min(chunk_s, middle.forward_s + middle.backward_s)
            block_backward_s = max(block_backward_s, middle.backward_s / n)
        starts_s = ends_s
        if stack.dp_overlap > 0:
            starts_s = fill_s + microbatches * chunk_s - block_backward_s * (1.0 - 1.0 / buckets)
        worst_s = max(worst_s, ends_s + sent.item_s, starts_s + sent.total_s + sent.latency_s)
    return worst_s


@formula
def _gather_wait_s(
    plan: Parallelism,
    first: BlockTime,
    layer: LayerTime,
    model: ModelNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
    per_chunk: float,
) -> float:
    """What the first block of the step waits for: the first part of the gather of its parameters (ZeRO 1 and 2)."""
    if plan.zero == 0 or plan.zero == 3 or plan.dp * plan.cp <= 1:
        return 0.0
    edge = model.embedding_params + (model.head_params if plan.pp == 1 else 0.0)
    occupied_s = latency_s = 0.0
    for expert in range(2):
        gather = gather_leg(plan, stack, layer, tiers_TF, job, expert, per_chunk, edge / plan.tp / plan.chunks)
        occupied_s += gather.occupied_s
        latency_s += gather.latency_s
    if occupied_s <= 0:
        return 0.0
    buckets = _buckets(plan, stack, per_chunk)
    needed = max(1.0 / buckets, 1.0 - first.forward_s * (buckets - 1.0) / (buckets * occupied_s))
    return latency_s + occupied_s * needed
