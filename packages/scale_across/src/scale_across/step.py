"""The step model: seconds and bytes of one training step of one candidate, as scalar formulas.

    step = microbatches x period + fill + exposed data-parallel traffic + optimizer

The period is the time of the slowest pipeline stage for one microbatch (compute, collectives that nothing hides, waits
for the host and for messages), the fill is what the other stages need before the first microbatch arrives (Narayanan et
al. 2021, arXiv 2104.04473: (pp - 1) / chunks of a stage time). `estimate_row` puts it together; docs/step_model.md
derives it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scale_across.collectives import (
    Tiers,
    all_reduce_s,
    all_to_all_s,
    outer_tier,
    phase_s,
    point_to_point_s,
)
from scale_across.compute import (
    COUNT,
    EXPERT_PARAMS,
    EXPERTS,
    HEAD_DIM,
    KV_HEADS,
    REPLICATED_PARAMS,
    SHARED_WIDTH,
    TENSOR_PARAMS,
    TOP_K,
    VALUE_DIM,
    GpuNumbers,
    Kinds,
    StackNumbers,
    head_s,
    layer_s,
)
from scale_across.jit import formula
from scale_across.memory import FRAGMENTATION, RESERVED_BYTES, held_microbatch_layers, layer_activation_bytes
from scale_across.parallelism import Parallelism

LAUNCHES_PER_COLLECTIVE = 2.0
"""A collective costs the host two launches: the kernel on its own stream, and the events that order the streams."""


class ModelNumbers(NamedTuple):
    """A model beyond its layers."""

    hidden: float
    vocab: float
    layers: float
    embedding_params: float
    head_params: float
    flops_per_token: float
    """Of the weight matrices, forward and backward: 6 per parameter that a token meets."""
    attention_flops_per_token: float
    """Of the attention core over the whole sequence, forward and backward, without regard to the causal mask."""


class JobNumbers(NamedTuple):
    """What a step trains on and how precisely."""

    global_batch: float
    seq: float
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    """fp32 master copy and two Adam moments."""


class Estimate(NamedTuple):
    """One step on the busiest GPU; the `_s` parts up to `optimizer_s` add up to `total_s`."""

    total_s: float
    compute_s: float
    """All microbatches on the slowest stage, recompute and host stalls included."""
    bubble_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float
    dp_s: float
    optimizer_s: float
    host_s: float
    """Part of compute_s in which the GPU waits for the host to launch."""
    bound_s: float
    """No schedule and no network makes this candidate faster in this model."""
    mfu: float
    hfu: float
    memory_bytes: float
    parameters_bytes: float
    gradients_bytes: float
    optimizer_state_bytes: float
    activations_bytes: float
    head_bytes: float
    buffers_bytes: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """By the count of `mfu`."""
    matmul_tflops_per_gpu: float
    """Weight matrices alone, 6 N D: what papers count that state training compute as 6 N D."""


class LayerTime(NamedTuple):
    """One microbatch through the average layer of the model, on one rank."""

    forward_s: float
    backward_s: float
    """Both gradients, recompute and the accumulation of gradients."""
    kernels: float
    tp_s: float
    cp_s: float
    ep_s: float
    activation_bytes: float
    params: float
    """Per rank, experts apart."""
    expert_params: float
    recompute_share: float
    """Recomputed FLOPs over forward FLOPs."""


@formula
def average_layer(
    plan: Parallelism,
    kinds_KF: Kinds,
    model: ModelNumbers,
    gpu: GpuNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
) -> LayerTime:
    """Mean over the kinds of layers, weighted by their counts; communication is what stays exposed."""
    tp, cp, ep, etp, mb = float(plan.tp), float(plan.cp), float(plan.ep), float(plan.etp), float(plan.microbatch)
    tokens = mb * job.seq / cp
    hidden_bytes = tokens * model.hidden * 2.0
    memory_rate = gpu.bytes_per_s * gpu.memory_fraction
    forward = backward = kernels = tp_s = cp_s = ep_s = held = params = experts = again = 0.0
    for index in range(len(kinds_KF)):
        kind = kinds_KF[index]
        weight = kind[COUNT] / model.layers
        time = layer_s(gpu, stack, kind, model.hidden, mb, job.seq, tp, float(plan.sp), cp, ep, etp)
        layer_params = kind[TENSOR_PARAMS] / tp + kind[REPLICATED_PARAMS]
        layer_experts = kind[EXPERT_PARAMS] / (ep * etp)
        repeat_s = time.forward_s if plan.recompute == 2 else (time.repeat_s if plan.recompute == 1 else 0.0)
        repeat_kernels = time.kernels_forward if plan.recompute == 2 else 0.0
        again += weight * repeat_s / time.forward_s
        forward += weight * (time.forward_s + time.kernels_forward * gpu.gap_s)
        backward += weight * (
            time.backward_input_s
            + time.backward_weight_s
            + repeat_s
            + (time.kernels_backward + repeat_kernels) * gpu.gap_s
            + (layer_params + layer_experts) * stack.accumulate_bytes / memory_rate
        )
        kernels += weight * (time.kernels_forward + time.kernels_backward + repeat_kernels)
        rounds = 6.0 if plan.recompute == 2 else 4.0
        dense_rounds = rounds if kind[EXPERTS] == 0 or kind[SHARED_WIDTH] > 0 else rounds / 2.0
        if tp > 1:
            reduce_s = all_reduce_s(tiers_TF, hidden_bytes, tp, 1.0, 0) + stack.collective_s
            tp_s += weight * dense_rounds * reduce_s * (1.0 - stack.tp_overlap)
            kernels += weight * dense_rounds * LAUNCHES_PER_COLLECTIVE
        if cp > 1:
            keys_bytes = 2.0 * mb * job.seq * (max(1.0, kind[KV_HEADS] / tp) * (kind[HEAD_DIM] + kind[VALUE_DIM]))
            sent_s = 3.0 * phase_s(tiers_TF, keys_bytes, cp, tp, 0)
            cp_s += weight * max(sent_s - stack.cp_overlap * 3.0 * time.attention_s, sent_s / cp)
        if kind[EXPERTS] > 0:
            routed_bytes = hidden_bytes * (etp / tp) * kind[TOP_K]
            exchange_s = all_to_all_s(
                tiers_TF, hidden_bytes / tp * kind[TOP_K], ep, etp
            )  # each rank sends its own tokens
            ep_s += weight * rounds * exchange_s * (1.0 - stack.ep_overlap)
            if etp > 1:
                tp_s += weight * rounds / 2.0 * all_reduce_s(tiers_TF, routed_bytes, etp, 1.0, 0)
        held += weight * layer_activation_bytes(
            stack, kind, model.hidden, mb, job.seq, tp, float(plan.sp), cp, etp, plan.recompute
        )
        params += weight * layer_params
        experts += weight * layer_experts
    return LayerTime(forward, backward, kernels, tp_s, cp_s, ep_s, held, params, experts, again)


class Stages(NamedTuple):
    """Layers of the first, the other and the last pipeline stage; the head counts on the last."""

    first: float
    middle: float
    last: float
    per_chunk: float


@formula
def split_layers(layers: float, pp: float, chunks: float) -> Stages:
    """Equal chunks; when one or two layers are missing for that, the last and the first stage have one less.

    That is how Llama 3 405B places 126 layers on 128 slots: embedding and head take a layer's place.
    """
    per_chunk = math.ceil(layers / (pp * chunks))
    missing = per_chunk * pp * chunks - layers
    full = per_chunk * chunks
    last = full - min(missing, 1.0)
    first = full - max(0.0, min(missing - 1.0, 1.0))
    if pp == 1:
        first = last = full = layers
    return Stages(first, full, last, per_chunk)


@formula
def boundary_s(tiers_TF: Tiers, nbytes: float, pp: float, stride: float) -> tuple[float, float]:
    """(slowest, sum over the pp - 1 boundaries) seconds of one message between neighbouring stages."""
    worst = total = 0.0
    counted = 0.0
    for back in range(len(tiers_TF)):  # outermost tier first: stages are cut at its domain borders, the rest lie inside
        tier = len(tiers_TF) - 1 - back
        domains = 1.0 if tier == len(tiers_TF) - 1 else math.ceil(pp * stride / tiers_TF[tier, 0])
        below = math.ceil(pp * stride / tiers_TF[tier - 1, 0]) if tier > 0 else pp
        crossings = max(0.0, min(below, pp) - min(domains, pp))
        if crossings > 0:
            message_s = point_to_point_s(tiers_TF, nbytes, tier)
            worst = max(worst, message_s)
            total += crossings * message_s
            counted += crossings
    return worst, total


@formula
def data_parallel_s(
    plan: Parallelism,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
    params: float,
    expert_params: float,
    microbatches: float,
    forward_s: float,
    backward_s: float,
    buckets: float,
) -> float:
    """Exposed seconds of gradient reduction and parameter gathering for one stage's parameters.

    ZeRO 0 all-reduces; 1 and 2 reduce-scatter and all-gather; 3 gathers twice and scatters once per microbatch; HSDP
    adds an all-reduce of the shard over the replicas. Overlapped traffic hides behind one microbatch's backward (or
    forward) time, except for its last bucket.
    """
    replicas = float(plan.dp) * plan.cp
    shard = float(plan.shard) if plan.shard > 0 else replicas
    if plan.zero == 0:
        shard = replicas
    stride = float(plan.tp) * (plan.pp if plan.order == 1 else 1)
    expert_replicas = max(1.0, replicas * plan.tp / (float(plan.ep) * plan.etp))
    expert_stride = stride * max(1.0, replicas / expert_replicas)
    reduce_s = gather_s = 0.0
    reduction = plan.reduction
    wire = stack.reduce_bytes
    for part in range(2):
        count = params if part == 0 else expert_params
        size = shard if part == 0 else min(shard, expert_replicas)
        step = stride if part == 0 else expert_stride
        whole = replicas if part == 0 else expert_replicas
        if count <= 0 or whole <= 1:
            continue
        reduce_s += phase_s(tiers_TF, count * wire, size, step, reduction)
        gather_s += phase_s(tiers_TF, count * (wire if plan.zero == 0 else job.parameter_bytes), size, step, reduction)
        outer = whole / size
        if outer > 1:
            reduce_s += all_reduce_s(tiers_TF, count * wire / size, outer, step * size, reduction)
    if plan.zero == 3:
        reduce_s *= microbatches
        gather_s *= 2.0 * microbatches
        window_s = microbatches * (forward_s + backward_s)
        sent_s = reduce_s + gather_s
        if stack.dp_overlap <= 0:
            return sent_s
        return max(sent_s - stack.dp_overlap * window_s, sent_s / (buckets * microbatches))
    if stack.dp_overlap <= 0:
        return reduce_s + gather_s
    exposed_s = max(reduce_s - stack.dp_overlap * backward_s, reduce_s / buckets)
    return exposed_s + max(gather_s - stack.dp_overlap * forward_s, gather_s / buckets)


@formula
def stalled_s(busy_s: float, launch_s: float, stack: StackNumbers) -> float:
    """Seconds of work that keeps the GPU busy for `busy_s` and the host for `launch_s`.

    At least the longer of the two. Near equality it is more, since short kernels wait for the host while long ones
    leave it idle: (busy^p + launch^p)^(1/p), where p tends to infinity as the queue between them gets deeper.
    """
    return (busy_s**stack.launch_power + launch_s**stack.launch_power) ** (1.0 / stack.launch_power)


@formula
def estimate_row(
    plan: Parallelism,
    kinds_KF: Kinds,
    model: ModelNumbers,
    gpu: GpuNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
) -> Estimate:
    """One candidate, every formula in one place; see the docs page on the step model for the derivation."""
    pp, chunks, tp, cp = float(plan.pp), float(plan.chunks), float(plan.tp), float(plan.cp)
    microbatches = job.global_batch / (float(plan.dp) * plan.microbatch)
    layer = average_layer(plan, kinds_KF, model, gpu, stack, tiers_TF, job)
    tokens = plan.microbatch * job.seq / cp
    stages = split_layers(model.layers, pp, chunks)

    # seconds per microbatch of the first, middle and last stage, GPU busy; then no faster than the host launches
    per_layer_s = layer.forward_s + layer.backward_s
    embed_s = 6.0 * tokens * model.hidden * 2.0 / (gpu.bytes_per_s * gpu.memory_fraction) + 6.0 * gpu.gap_s
    vocab_s = head_s(gpu, stack, model.hidden, model.vocab, tokens, tp) + 12.0 * gpu.gap_s
    comm_s = layer.tp_s + layer.cp_s + layer.ep_s
    launch_s = layer.kernels * stack.dispatch_s
    head_launch_s = 20.0 * stack.dispatch_s
    if pp == 1:
        busy_s = model.layers * (per_layer_s + comm_s) + embed_s + vocab_s
        slowest_s = sum_s = stalled_s(busy_s, model.layers * launch_s + head_launch_s, stack)
        slow_layers, slow_extra_s = model.layers, embed_s + vocab_s
    else:
        first_s = stalled_s(
            stages.first * (per_layer_s + comm_s) + embed_s, stages.first * launch_s + head_launch_s / 2, stack
        )
        middle_s = stages.middle * stalled_s(per_layer_s + comm_s, launch_s, stack)
        last_s = stalled_s(
            stages.last * (per_layer_s + comm_s) + vocab_s, stages.last * launch_s + head_launch_s, stack
        )
        sum_s = first_s + (pp - 2.0) * middle_s + last_s
        slowest_s, slow_layers, slow_extra_s = first_s, stages.first, embed_s
        if pp > 2 and middle_s > slowest_s:
            slowest_s, slow_layers, slow_extra_s = middle_s, stages.middle, 0.0
        if last_s > slowest_s:
            slowest_s, slow_layers, slow_extra_s = last_s, stages.last, vocab_s
    busy_s = slow_layers * per_layer_s + slow_extra_s
    comm_microbatch_s = slow_layers * comm_s
    host_s = max(0.0, slowest_s - busy_s - comm_microbatch_s)

    # the pipeline: period per microbatch, and the fill
    message = tokens * model.hidden * 2.0 / (tp if stack.scatter_gather > 0 or plan.sp > 0 else 1.0)
    stride = tp * cp * (plan.dp if plan.order == 0 else 1)
    worst_s = boundaries_s = 0.0
    if pp > 1:
        worst_s, boundaries_s = boundary_s(tiers_TF, message, pp, stride)
        if chunks > 1:
            worst_s = max(worst_s, point_to_point_s(tiers_TF, message, outer_tier(tiers_TF, pp, stride)))
    exposed_s = (1.0 - stack.pp_overlap) * 2.0 * chunks * worst_s
    round_trip_s = sum_s + 2.0 * (chunks * boundaries_s + (chunks - 1.0) * worst_s)
    in_flight = pp + (pp - 1.0) / chunks if chunks > 1 else pp
    period_s = max(slowest_s + exposed_s, round_trip_s / in_flight) if pp > 1 else slowest_s
    fill_s = (sum_s - slowest_s) / chunks
    pp_s = microbatches * (period_s - slowest_s) + 2.0 * boundaries_s

    # parameters of the busiest rank: the embedding is on the first stage, the head on the last
    stage_params = (slow_layers if pp == 1 else stages.middle) * layer.params
    edge = model.embedding_params + (model.head_params if pp == 1 else 0.0)
    params = stage_params + max(edge, model.head_params) / tp
    expert_params = (slow_layers if pp == 1 else stages.middle) * layer.expert_params
    shard = float(plan.shard) if plan.shard > 0 else float(plan.dp) * cp
    expert_shard = max(1.0, min(shard, shard * tp / (float(plan.ep) * plan.etp)))
    dp_s = data_parallel_s(
        plan,
        stack,
        tiers_TF,
        job,
        params,
        expert_params,
        microbatches,
        stages.middle * layer.forward_s,
        stages.middle * layer.backward_s,
        max(1.0, stages.middle),
    )
    owned = params + expert_params if plan.zero == 0 else params / shard + expert_params / expert_shard
    optimizer_s = owned * stack.optimizer_bytes / (gpu.bytes_per_s * gpu.memory_fraction)

    # memory of the worst rank
    held = held_microbatch_layers(stages.per_chunk, pp, chunks, microbatches)
    if pp == 1:
        held = model.layers
    activations = held * layer.activation_bytes * (1.0 + FRAGMENTATION)
    logits = 8.0 * tokens * model.vocab / tp if pp == 1 else 0.0
    parameter_bytes = (params + expert_params) * job.parameter_bytes if plan.zero < 3 else owned * job.parameter_bytes
    gradient_bytes = (params + expert_params if plan.zero < 2 else owned) * job.gradient_bytes
    buffers = RESERVED_BYTES
    if plan.zero == 3:
        buffers += 2.0 * (layer.params + layer.expert_params) * (job.parameter_bytes + job.gradient_bytes)
    state = owned * job.optimizer_bytes
    memory = parameter_bytes + gradient_bytes + state + activations + logits + buffers

    compute_s = microbatches * (busy_s + host_s)
    total_s = microbatches * slowest_s + fill_s + pp_s + dp_s + optimizer_s
    gpus = tp * cp * pp * plan.dp
    step_tokens = job.global_batch * job.seq
    model_flops = step_tokens * (model.flops_per_token + model.attention_flops_per_token)
    hardware_flops = model_flops * (1.0 + layer.recompute_share / 3.0)
    return Estimate(
        total_s,
        compute_s,
        fill_s,
        microbatches * slow_layers * layer.tp_s,
        microbatches * slow_layers * layer.cp_s,
        microbatches * slow_layers * layer.ep_s,
        pp_s,
        dp_s,
        optimizer_s,
        microbatches * host_s,
        microbatches * busy_s + optimizer_s,
        model_flops / (total_s * gpus * gpu.flops),
        hardware_flops / (total_s * gpus * gpu.flops),
        memory,
        parameter_bytes,
        gradient_bytes,
        state,
        activations,
        logits,
        buffers,
        step_tokens / total_s / gpus,
        model_flops / total_s / gpus / 1e12,
        step_tokens * model.flops_per_token / total_s / gpus / 1e12,
    )
