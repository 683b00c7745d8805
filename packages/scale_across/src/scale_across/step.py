"""The step model: seconds and bytes of one training step of one candidate, as scalar formulas.

    step = microbatches x period + fill + exposed data-parallel traffic + optimizer

The period is the time of the slowest pipeline stage for one microbatch (compute, collectives that nothing hides, waits
for the host and for messages), the fill is what the other stages need before the first microbatch arrives (Narayanan et
al. 2021, arXiv 2104.04473: (pp - 1) / chunks of a stage time). `estimate_row` puts it together; docs/step_model.md
derives it.
"""

from __future__ import annotations

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
from scale_across.traffic import (
    boundary_s,
    data_parallel_s,
    expert_stride,
    round_trip_period_s,
    split_layers,
    stalled_s,
)

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
    causal_flops_per_token: float
    """The same over the pairs that the causal mask leaves."""


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
    causal_tflops_per_gpu: float
    """The same without the masked half of attention."""


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
    weight_share: float
    """Of the backward pass: weight gradients (recompute and communication belong to the input gradient)."""


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
    inputs_s = weights_s = 0.0
    for index in range(len(kinds_KF)):
        kind = kinds_KF[index]
        weight = kind[COUNT] / model.layers
        time = layer_s(gpu, stack, kind, model.hidden, mb, job.seq, tp, float(plan.sp), cp, ep, etp)
        layer_params = kind[TENSOR_PARAMS] / tp + kind[REPLICATED_PARAMS]
        layer_experts = kind[EXPERT_PARAMS] / (ep * etp)
        repeat_s = time.forward_s if plan.recompute == 2 else (time.repeat_s if plan.recompute == 1 else 0.0)
        repeat_kernels = time.kernels_forward if plan.recompute == 2 else 0.0
        again += weight * repeat_s / time.forward_s
        inputs_s += weight * (time.backward_input_s + repeat_s)
        weights_s += weight * time.backward_weight_s
        forward += weight * (time.forward_s + time.kernels_forward * gpu.gap_s)
        backward += weight * (
            time.backward_input_s
            + time.backward_weight_s
            + repeat_s
            + (time.kernels_backward + repeat_kernels) * gpu.gap_s
            + (layer_params + layer_experts) * stack.accumulate_bytes / memory_rate
        )
        kernels += weight * (time.kernels_forward + time.kernels_backward + repeat_kernels)
        hidden_share = stack.tp_backward_overlap * (0.5 if plan.sp > 0 else 1.0)
        rounds = 2.0 + 2.0 * (1.0 - hidden_share) + (2.0 if plan.recompute == 2 else 0.0)
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
            exchange_s = all_to_all_s(  # each rank sends its own tokens
                tiers_TF, hidden_bytes / tp * kind[TOP_K], ep, expert_stride(plan)
            )
            ep_s += weight * (6.0 if plan.recompute == 2 else 4.0) * exchange_s * (1.0 - stack.ep_overlap)
            if etp > 1:
                tp_s += weight * rounds / 2.0 * all_reduce_s(tiers_TF, routed_bytes, etp, 1.0, 0)
        held += weight * layer_activation_bytes(
            stack, kind, model.hidden, mb, job.seq, tp, float(plan.sp), cp, etp, plan.recompute
        )
        params += weight * layer_params
        experts += weight * layer_experts
    share = weights_s / (inputs_s + weights_s)
    return LayerTime(forward, backward, kernels, tp_s, cp_s, ep_s, held, params, experts, again, share)


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
    layer = average_layer(plan, kinds_KF, model, gpu, stack, tiers_TF, job)
    return estimate_layers(plan, layer, model, gpu, stack, tiers_TF, job)


@formula
def estimate_layers(
    plan: Parallelism,
    layer: LayerTime,
    model: ModelNumbers,
    gpu: GpuNumbers,
    stack: StackNumbers,
    tiers_TF: Tiers,
    job: JobNumbers,
) -> Estimate:
    """`estimate_row` when the time of the average layer is known."""
    pp, chunks, tp, cp = float(plan.pp), float(plan.chunks), float(plan.tp), float(plan.cp)
    microbatches = job.global_batch / (float(plan.dp) * plan.microbatch)
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
        middle_s = last_s = 0.0
        slowest_s = sum_s = stalled_s(busy_s, model.layers * launch_s + head_launch_s)
        slow_layers, slow_extra_s = model.layers, embed_s + vocab_s
    else:
        first_s = stalled_s(
            stages.first * (per_layer_s + comm_s) + embed_s, stages.first * launch_s + head_launch_s / 2
        )
        middle_s = stages.middle * stalled_s(per_layer_s + comm_s, launch_s)
        last_s = stalled_s(stages.last * (per_layer_s + comm_s) + vocab_s, stages.last * launch_s + head_launch_s)
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
    period_s = slowest_s
    if pp > 1:
        least_s = round_trip_period_s(tiers_TF, message, pp, stride, chunks, middle_s, last_s)
        period_s = max(slowest_s + exposed_s, round_trip_s / in_flight, least_s)
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
        job.parameter_bytes,
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
        step_tokens * (model.flops_per_token + model.causal_flops_per_token) / total_s / gpus / 1e12,
    )
