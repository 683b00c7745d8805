"""A lower bound on the simulated step of one plan under a family of schedules, and the memory that it needs.

For a stage: the parameters that the first block waits for, the forward blocks before it, all of its own blocks, and
for schedules that do not split gradients the backward blocks after it; the reductions, which can start only when a
chunk has seen every microbatch; and the rounds that memory allows: with h microbatches under way at most, a step takes
ceil(m / h) round trips. Each of these holds for every order of blocks in the family, so their maximum does. Times of
blocks and collectives are those of the simulation (`blocks.py`). Messages inside a site count as instant.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scale_across.blocks import (
    BlockTime,
    Leg,
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

LOOP, WAVE, LOCAL, ANY = 0, 1, 2, 3
"""Which device holds the virtual stages: round and round, to and fro, to and fro inside each site; ANY: unknown."""
PLAIN, ALL_HELD, ONCE_HELD, TWICE_HELD, MEMORY_HELD, ANY_SCHEDULE, ANY_SHARDING = 0, 1, 2, 3, 4, 5, 6
"""What a stage holds: as (interleaved) 1F1B, everything, a pipeline's worth, twice that, what fits; any of these;
and any of these with any sharding of parameters too."""


MOST_PRICE = 0.1
"""At least what sequence slices cost in block time."""


class Family(NamedTuple):
    """What the bound must know of a schedule. Relaxed: a family that holds several, each no faster."""

    split: int
    """1: input and weight gradients are blocks of their own."""
    devices: int
    """LOOP, WAVE, LOCAL or ANY."""
    slices: float
    price: float
    """How much longer blocks take because of slices."""
    held: float
    """Chunk-microbatches whose activations the fullest stage holds (the least that works where the memory decides);
    0: whatever the sharding of parameters, which the bound then leaves out."""
    first_held: float
    """Microbatches under way at the first stage at most; 0: unknown; -1: as many as the memory takes."""
    last_held: float
    """1: a stage with n - 1 behind it has n microbatches under way; 2: 2 n - 1; 0: unknown."""
    last_blocks: float
    """Backward blocks of other chunks that follow the end of the first chunk to finish; 0: unknown."""


@formula
def family_of(
    kind: int, split: int, devices: int, slices: float, price: float, pp: float, chunks: float, microbatches: float
) -> Family:
    """A row of `families.CODES` for the degrees of a plan."""
    if kind >= 5:  # any schedule of these degrees: interleaved ones of three and more chunks never split gradients
        split = 1 if chunks <= 2 else 0
        held = min(pp, microbatches) * chunks if kind == 5 else 0.0
        return Family(split, 3 if chunks > 1 else 0, slices, 0.0, held, 0.0, 0.0, 0.0)
    everything = microbatches * chunks
    held = everything
    if kind == 0:
        held = min(pp * chunks + pp - 1.0 if chunks > 1 else pp, everything)
    elif kind == 3:
        held = min(2.0 * pp - 1.0, everything)
    elif kind != 1:
        held = min(pp * chunks, everything)
    first_held = last_held = 0.0
    if kind == 4:
        first_held = -1.0
    elif chunks == 1:
        first_held = held
        last_held = 2.0 if kind == 3 else 1.0
    last_blocks = 0.0
    if kind == 0 and chunks > 1:  # depth first: groups of a pipeline's worth of microbatches
        last_blocks = (chunks - 1.0) * pp
    elif kind == 1:
        last_blocks = (chunks - 1.0) * microbatches
    return Family(split, devices, slices, price, held, first_held, last_held, last_blocks)


class Far(NamedTuple):
    """The hops between sites that a pipeline crosses, each the faster of its two directions."""

    sites: float
    """Over which the pipeline runs; 1: none."""
    slowest_s: float
    """Seconds per byte of the slowest hop."""
    slowest_latency_s: float
    path_s: float
    """Seconds per byte of all hops from the first site to the last, added up."""
    path_latency_s: float
    close_s: float
    """Seconds per byte from the last site to the first; 0 without interleaving."""
    close_latency_s: float
    last_s: float
    """Seconds per byte of the hop to the last site."""
    last_latency_s: float
    last_stages: float
    """Stages at the last site."""


class Bound(NamedTuple):
    """What the search needs of a row."""

    bound_s: float
    memory_bytes: float
    estimate_s: float
    """Of (interleaved) 1F1B by the closed form."""


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
    room = gpu.memory_bytes - (estimate.memory_bytes - estimate.activations_bytes)
    fits = room / (per_chunk * chunks * layer.activation_bytes * (1.0 + FRAGMENTATION))
    compute_s = _pipeline_s(plan, family, far, fits, first, middle, last, microbatches, layer, model, stack, job)
    reduce_s = wait_s = 0.0
    if family.held > 0.0:
        # with sequence slices the first block is longer, so that less must be there before it
        longest_s = first.forward_s * (1.0 + MOST_PRICE if family.slices > 1.0 and family.price <= 0.0 else 1.0)
        wait_s, last_chunk_s = _gather_wait_s(plan, longest_s, layer, model, stack, tiers_TF, job, per_chunk)
        late_s = _wire_s(plan, family, far, last, microbatches, layer, model, stack, job)
        if plan.pp > 1 and plan.chunks > 1 and family.last_blocks > 0 and last_chunk_s > wait_s:
            # no backward block before the last chunk's parameters have come and a microbatch has gone to the end
            forward_s = min(first.forward_s, middle.forward_s, last.forward_s)
            backward_s = min(first.backward_s, middle.backward_s, last.backward_s)
            chain_s = pp * forward_s + (pp - 1.0 + microbatches * chunks) * backward_s
            late_s = max(late_s, last_chunk_s - wait_s + chain_s)
        reduce_s = _reduce_s(
            plan, family, late_s, first, middle, last, microbatches, layer, model, stack, tiers_TF, job, per_chunk
        )
        compute_s = max(compute_s, late_s)
    bound_s = wait_s + max(compute_s, reduce_s) + estimate.optimizer_s
    memory = estimate.memory_bytes
    if plan.pp > 1:
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
    if family.devices == 3:
        return chunks * min(first_s, middle_s, last_s)
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
    fits: float,
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
    split = plan.tp if stack.scatter_gather > 0 or plan.sp > 0 else 1
    message = plan.microbatch * job.seq / plan.cp * model.hidden * 2.0 / split
    path_s = message * far.path_s / n + far.path_latency_s
    last_hop_s = message * far.last_s / n + far.last_latency_s
    inner = pp - 2.0
    fill_s = (first.forward_s + inner * middle.forward_s) / n + path_s
    drain_s = 0.0 if family.split == 1 else first.backward_s + inner * middle.backward_s + path_s
    total_s = max(
        microbatches * _device_s(family, chunks, 0, first, middle, last),
        fill_s + microbatches * _device_s(family, chunks, 2, first, middle, last) + drain_s,
    )
    if family.devices == 2:  # every stage before the last site comes twice before the first stage there
        through_s = (first.forward_s + (2.0 * (pp - far.last_stages) - 1.0) * middle.forward_s) / n + path_s
        last_s = last.forward_s + last.backward_s + (chunks - 1.0) * (middle.forward_s + middle.backward_s)
        total_s = max(total_s, through_s + microbatches * last_s)
    if plan.pp > 2:
        nearer_s = last_hop_s if far.last_stages < 2.0 else 0.0
        before_s = fill_s - middle.forward_s / n - nearer_s
        after_s = 0.0 if family.split == 1 else drain_s - middle.backward_s - nearer_s
        total_s = max(total_s, before_s + microbatches * _device_s(family, chunks, 1, first, middle, last) + after_s)
    if far.sites > 1.0:
        wire_s = microbatches * message * far.slowest_s * (chunks if family.devices < 2 else 1.0)
        least_s = min(
            _device_s(family, chunks, 0, first, middle, last),
            _device_s(family, chunks, 1, first, middle, last),
            _device_s(family, chunks, 2, first, middle, last),
        )
        # a stage at the border computes, and waits for its own messages to leave
        total_s = max(total_s, wire_s, microbatches * least_s + (1.0 - stack.pp_overlap) * wire_s)
        if family.last_blocks > 0 and family.split == 0:
            total_s = max(total_s, _laps_s(pp, chunks, far, message, first, middle, last, microbatches))
    return max(
        total_s, _rounds_s(plan, family, far, fits, first, middle, last, microbatches, layer, path_s, last_hop_s)
    )


@formula
def _wire_s(
    plan: Parallelism,
    family: Family,
    far: Far,
    last: BlockTime,
    microbatches: float,
    layer: LayerTime,
    model: ModelNumbers,
    stack: StackNumbers,
    job: JobNumbers,
) -> float:
    """Every microbatch goes over the slowest hop, and the last one through the last stage and back over it."""
    if far.sites <= 1.0:
        return 0.0
    n = family.slices
    split = plan.tp if stack.scatter_gather > 0 or plan.sp > 0 else 1
    wire_s = plan.microbatch * job.seq / plan.cp * model.hidden * 2.0 / split * far.slowest_s
    back = 1.0 - (layer.weight_share if family.split == 1 else 0.0)
    turn_s = min(last.forward_s, last.backward_s) * (1.0 + back) / n
    crossings = float(plan.chunks) if family.devices < 2 else 1.0
    return microbatches * crossings * wire_s + 2.0 * far.slowest_latency_s + wire_s / n + turn_s


@formula
def _laps_s(
    pp: float,
    chunks: float,
    far: Far,
    message: float,
    first: BlockTime,
    middle: BlockTime,
    last: BlockTime,
    microbatches: float,
) -> float:
    """Interleaved 1F1B: each group of `pp` microbatches waits at the first stage while a chunk goes once around.

    A chunk's block starts there one lap after the same microbatch's block of the chunk before, and blocks start in
    order, so a group takes chunks - 1 laps and the forward blocks of its last chunk. After the last of all, every
    chunk goes back.
    """
    close_s = message * far.close_s + far.close_latency_s
    path_s = message * far.path_s + far.path_latency_s
    forward_s = min(first.forward_s, middle.forward_s, last.forward_s)
    backward_s = min(first.backward_s, middle.backward_s, last.backward_s)
    group_s = (chunks - 1.0) * (pp * forward_s + path_s + close_s) + pp * forward_s
    back_s = chunks * (pp * backward_s + path_s) + (chunks - 1.0) * close_s
    return microbatches / pp * group_s + path_s + back_s


@formula
def _rounds_s(
    plan: Parallelism,
    family: Family,
    far: Far,
    fits: float,
    first: BlockTime,
    middle: BlockTime,
    last: BlockTime,
    microbatches: float,
    layer: LayerTime,
    path_s: float,
    last_hop_s: float,
) -> float:
    """With h microbatches under way at most, a step takes ceil(m / h) round trips from a stage to the end and back."""
    if plan.chunks > 1:
        return 0.0
    total_s, inner, n = 0.0, plan.pp - 2.0, family.slices
    back = 1.0 - (layer.weight_share if family.split == 1 else 0.0)
    first_s, last_s = first.forward_s + back * first.backward_s, last.forward_s + back * last.backward_s
    middle_s = middle.forward_s + back * middle.backward_s
    held = math.floor(min(fits, microbatches)) if family.first_held < 0 else family.first_held
    if held >= 1.0:
        around_s = (first_s + inner * middle_s + last_s) / n + 2.0 * path_s
        total_s = math.ceil(microbatches / held - 1e-9) * around_s
    if family.last_held > 0 and far.sites > 1.0:
        behind = far.last_stages
        around_s = (behind * min(first_s, middle_s) + last_s) / n + 2.0 * last_hop_s
        held = family.last_held * (behind + 1.0) - (1.0 if family.last_held > 1.0 else 0.0)
        total_s = max(total_s, math.ceil(microbatches / held - 1e-9) * around_s)
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
    again = 1.0 if plan.zero == 0 else 0.0  # without ZeRO the gathers of gradients follow
    scatter, outer = reduce_leg(plan, stack, layer, tiers_TF, 0, per_chunk, extra)
    gather = gather_leg(plan, stack, layer, tiers_TF, job, 0, per_chunk, extra)
    item_s = (scatter.occupied_s + outer.occupied_s + again * gather.occupied_s) / buckets
    item_s += scatter.latency_s + outer.latency_s + again * gather.latency_s
    if layer.expert_params > 0:
        experts, outers = reduce_leg(plan, stack, layer, tiers_TF, 1, per_chunk, extra)
        gathers = gather_leg(plan, stack, layer, tiers_TF, job, 1, per_chunk, extra)
        item_s += (experts.occupied_s + outers.occupied_s + again * gathers.occupied_s) / buckets
        item_s += experts.latency_s + outers.latency_s + again * gathers.latency_s
    else:
        experts = outers = gathers = Leg(0, 0.0, 0.0)
    sent = (
        scatter,
        outer,
        Leg(gather.tier, again * gather.occupied_s, gather.latency_s),
        experts,
        outers,
        Leg(gathers.tier, again * gathers.occupied_s, gathers.latency_s),
    )
    busiest_s = latency_s = 0.0
    for first in range(6):  # the stream to every tier that one of the legs goes to
        here_s, least_s = 0.0, math.inf
        for other in range(6):
            if sent[other].tier == sent[first].tier and sent[other].occupied_s > 0:
                here_s += sent[other].occupied_s
                least_s = min(least_s, sent[other].latency_s)
        if here_s > busiest_s:
            busiest_s, latency_s = here_s, least_s
    return _Reduction(busiest_s * plan.chunks, item_s, latency_s)


@formula
def _reduce_s(
    plan: Parallelism,
    family: Family,
    late_s: float,
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
    """From the first block to the end of the reductions of the first and the last device.

    `late_s` is another bound on the end of the first device's blocks.
    """
    if plan.zero == 3 or plan.dp * plan.cp <= 1:
        return 0.0
    chunks, n, pp = float(plan.chunks), family.slices, float(plan.pp)
    buckets = _buckets(plan, stack, per_chunk)
    worst_s = 0.0
    for which in range(0, 3, 2):
        edge = model.embedding_params if which == 0 else model.head_params
        if family.devices > 0 and which == 2:  # the head is on some other stage
            edge = 0.0
        if plan.pp == 1:
            edge = model.embedding_params + model.head_params
        sent = _reduction(plan, stack, layer, tiers_TF, job, per_chunk, edge / plan.tp / chunks)
        fill_s = (first.forward_s + (pp - 2.0) * middle.forward_s) / n if which == 2 and plan.pp > 1 else 0.0
        device_s = microbatches * _device_s(family, chunks, which, first, middle, last)
        if plan.pp == 1:
            device_s = microbatches * (first.forward_s + first.backward_s)
        ends_s = max(fill_s + device_s, late_s if which == 0 else 0.0)
        own = first if which == 0 else last
        chunk_s = own.forward_s + own.backward_s
        whole = n if family.price > 0.0 else 1.0  # relaxed: slices are possible, not certain
        block_backward_s = own.backward_s / whole
        if plan.chunks > 1 or family.devices > 0:
            chunk_s = min(chunk_s, middle.forward_s + middle.backward_s)
            block_backward_s = max(block_backward_s, middle.backward_s / whole)
        starts_s = last_starts_s = ends_s
        if stack.dp_overlap > 0:  # buckets go while the chunk's last block runs
            early_s = block_backward_s * (1.0 - 1.0 / buckets)
            starts_s = fill_s + microbatches * chunk_s - early_s
            last_starts_s = ends_s - early_s
            if family.last_blocks > 0:
                starts_s = max(starts_s, last_starts_s - family.last_blocks * block_backward_s)
        worst_s = max(worst_s, ends_s + sent.item_s, starts_s + sent.total_s + sent.latency_s)
        worst_s = max(worst_s, last_starts_s + sent.total_s / chunks + sent.latency_s)
    return worst_s


@formula
def _gather_wait_s(
    plan: Parallelism,
    first_forward_s: float,
    layer: LayerTime,
    model: ModelNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
    per_chunk: float,
) -> tuple[float, float]:
    """When the first chunk's first block can start, and when the last chunk's can, for the gathers of parameters.

    Chunks are gathered one after another (ZeRO 1 and 2); a block needs the first part of its chunk's.
    """
    if plan.zero == 0 or plan.zero == 3 or plan.dp * plan.cp <= 1:
        return 0.0, 0.0
    edge = model.embedding_params + (model.head_params if plan.pp == 1 else 0.0)
    extra = edge / plan.tp / plan.chunks
    dense = gather_leg(plan, stack, layer, tiers_TF, job, 0, per_chunk, extra)
    experts = gather_leg(plan, stack, layer, tiers_TF, job, 1, per_chunk, extra)
    occupied_s, latency_s = dense.occupied_s + experts.occupied_s, dense.latency_s + experts.latency_s
    if occupied_s <= 0:
        return 0.0, 0.0
    buckets = _buckets(plan, stack, per_chunk)
    needed = max(1.0 / buckets, 1.0 - first_forward_s * (buckets - 1.0) / (buckets * occupied_s))
    busiest_s = occupied_s if dense.tier == experts.tier else max(dense.occupied_s, experts.occupied_s)
    return latency_s + occupied_s * needed, busiest_s * (plan.chunks - 1.0) + min(dense.latency_s, latency_s)
