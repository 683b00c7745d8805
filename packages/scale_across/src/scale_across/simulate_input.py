"""What a simulated step does: a plan's block durations, messages and collectives, from the formulas of the estimate.

    schedule, work, policy = candidate(setup, Parallelism(tp=8, pp=16, dp=64, chunks=8))
    simulate(schedule, work, policy).step_s

The same seconds as in `step.py`, laid out in time instead of summed: what is hidden, what queues and how long the
pipeline takes to fill then follow from the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scale_across.collectives import all_reduce_s, outer_tier, phase_s
from scale_across.compute import COUNT, head_s, layer_s
from scale_across.estimate import Setup
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import DP_OUTERMOST, FULL, Parallelism
from scale_across.simulate_tables import Phase, Work
from scale_across.step import LayerTime, average_layer
from scale_across.traffic import split_layers, stalled_s

F, D, W, B = 0, 1, 2, 3


@dataclass(frozen=True)
class Order:
    """Block orders as the simulation reads them: arrays [stage, place]."""

    kind_SN: npt.NDArray[np.int8]
    microbatch_SN: npt.NDArray[np.int32]
    chunk_SN: npt.NDArray[np.int16]
    slice_SN: npt.NDArray[np.int16]
    device_of_virtual_V: npt.NDArray[np.int64]


def interleaved_order(stages: int, chunks: int, microbatches: int) -> Order:
    """(Interleaved) 1F1B as Megatron-LM runs it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Stage s runs min(all, (S - s - 1) or, interleaved, 2 (S - s - 1) + (chunks - 1) S) forward blocks, then one forward
    and one backward by turns. The k-th block takes chunk (k / S) mod chunks, in groups of S microbatches.
    """
    blocks = microbatches * chunks
    k = np.arange(blocks)
    group = stages if chunks > 1 else microbatches
    chunk_k = k // group % chunks
    microbatch_k = k // (group * chunks) * group + k % group
    kind = np.empty((stages, 2 * blocks), np.int8)
    index = np.empty((stages, 2 * blocks), np.int64)
    for s in range(stages):
        warm = stages - s - 1 if chunks == 1 else 2 * (stages - s - 1) + (chunks - 1) * stages
        warm = min(warm, blocks)
        steady = blocks - warm
        kind[s] = np.concatenate([np.full(warm, F), np.tile([F, B], steady), np.full(warm, B)])
        index[s, kind[s] == F] = k
        index[s, kind[s] == B] = k
    chunk = np.where(kind == F, chunk_k[index], chunks - 1 - chunk_k[index])
    return Order(
        kind,
        microbatch_k[index].astype(np.int32),
        chunk.astype(np.int16),
        np.zeros_like(chunk, np.int16),
        np.arange(stages * chunks) % stages,
    )


def candidate(
    setup: Setup, plan: Parallelism, order: Any = None, policy: OverlapPolicy | None = None
) -> tuple[Any, Work, OverlapPolicy]:
    """Schedule, work and policy of one plan; by default (interleaved) 1F1B and what the software stack overlaps."""
    microbatches = int(setup.job.global_batch) // (plan.dp * plan.microbatch)
    order = order or interleaved_order(plan.pp, plan.chunks, microbatches)
    work = work_of(setup, plan)
    if policy is None:
        layers = split_layers(setup.model_numbers.layers, float(plan.pp), float(plan.chunks)).per_chunk
        overlapped = setup.stack.dp_overlap > 0
        policy = OverlapPolicy(
            send_exposed=1.0 - setup.stack.pp_overlap,
            buckets=max(1, int(layers)) if overlapped else 1,
            reduce_overlap=overlapped,
        )
    return order, work, policy


def work_of(setup: Setup, plan: Parallelism) -> Work:
    """Durations and transfers of a plan; every stage has one outgoing stream per tier of the network."""
    layer = average_layer(plan, setup.kinds_KF, setup.model_numbers, setup.gpu, setup.stack, setup.tiers_TF, setup.job)
    tiers = len(setup.tiers_TF)
    names = tuple(f"stage {s}, {name}" for s in range(plan.pp) for name in setup.tier_names)
    resource_SS, occupied_SS, latency_SS = _messages(setup, plan)
    reduce_S, gather_S = _data_parallel(setup, plan, layer)
    return Work(
        duration_KV=_durations(setup, plan, layer),
        resource_SS=resource_SS,
        occupied_s_SS=occupied_SS,
        latency_s_SS=latency_SS,
        resources=names,
        replicas_R=np.ones(plan.pp * tiers, np.int32),
        reduce_S=reduce_S,
        gather_S=gather_S,
        optimizer_s=setup.estimate(plan).optimizer_s,
    )


def _durations(setup: Setup, plan: Parallelism, layer: LayerTime) -> npt.NDArray[np.float64]:
    """Seconds of F, D, W and B by virtual stage: layers, embedding and head, collectives and waits for the host."""
    virtuals = plan.pp * plan.chunks
    stages = split_layers(setup.model_numbers.layers, float(plan.pp), float(plan.chunks))
    layers_V = np.full(virtuals, stages.per_chunk if plan.pp > 1 else setup.model_numbers.layers / virtuals)
    if plan.pp > 1:
        layers_V[0] -= stages.middle - stages.first
        layers_V[-1] -= stages.middle - stages.last
    tokens = plan.microbatch * setup.job.seq / plan.cp
    gpu, hidden = setup.gpu, setup.model_numbers.hidden
    edge_V = np.zeros(virtuals)
    edge_V[0] += 6.0 * tokens * hidden * 2.0 / (gpu.bytes_per_s * gpu.memory_fraction) + 6.0 * gpu.gap_s
    edge_V[-1] += head_s(gpu, setup.stack, hidden, setup.model_numbers.vocab, tokens, float(plan.tp)) + 12.0 * gpu.gap_s
    again = 2.0 if plan.recompute == FULL else 0.0
    hidden_share = setup.stack.tp_backward_overlap * (0.5 if plan.sp > 0 else 1.0)
    tp_forward_s = layer.tp_s * 2.0 / (2.0 + 2.0 * (1.0 - hidden_share) + again)
    ep_forward_s = layer.ep_s * 2.0 / (4.0 + again)
    comm_s, comm_forward_s = layer.tp_s + layer.cp_s + layer.ep_s, tp_forward_s + ep_forward_s + layer.cp_s / 3.0
    forward_V = layers_V * (layer.forward_s + comm_forward_s) + edge_V / 3.0
    both_V = layers_V * (layer.backward_s + comm_s - comm_forward_s) + edge_V * 2.0 / 3.0
    launch_V = layers_V * layer.kernels * setup.stack.dispatch_s
    launch_V[-1] += 20.0 * setup.stack.dispatch_s
    busy_V = forward_V + both_V
    stall_V = np.array([stalled_s(b, c) for b, c in zip(busy_V, launch_V, strict=True)]) / busy_V
    gathered_s, sent_back_s = _sharded_parameters(setup, plan, layer)
    overlap = setup.stack.dp_overlap
    forward_V, both_V = forward_V * stall_V, both_V * stall_V
    forward_V += np.maximum(layers_V * gathered_s - overlap * forward_V, 0.0)
    both_V += np.maximum(layers_V * (gathered_s + sent_back_s) - overlap * both_V, 0.0)
    weight_V = both_V * _weight_share(setup, plan)
    return np.stack([forward_V, both_V - weight_V, weight_V, both_V])


def _weight_share(setup: Setup, plan: Parallelism) -> float:
    """Weight gradients' share of a backward block (recompute and communication belong to the input gradient)."""
    inputs = weights = 0.0
    for kind in setup.kinds_KF:
        time = layer_s(
            setup.gpu, setup.stack, kind, setup.model_numbers.hidden, float(plan.microbatch), setup.job.seq,
            float(plan.tp), float(plan.sp), float(plan.cp), float(plan.ep), float(plan.etp),
        )  # fmt: skip
        again = time.forward_s if plan.recompute == FULL else (time.repeat_s if plan.recompute else 0.0)
        inputs += kind[COUNT] * (time.backward_input_s + again)
        weights += kind[COUNT] * time.backward_weight_s
    return float(weights / (inputs + weights))


def _messages(setup: Setup, plan: Parallelism) -> tuple[Any, Any, Any]:
    """[stage, stage] outgoing stream, seconds on it, latency: each pair at the innermost tier that holds both."""
    stride = plan.tp * plan.cp * (1 if plan.order == DP_OUTERMOST else plan.dp)
    split = plan.tp if setup.stack.scatter_gather > 0 or plan.sp > 0 else 1
    nbytes = plan.microbatch * setup.job.seq / plan.cp * setup.model_numbers.hidden * 2.0 / split
    first = np.arange(plan.pp) * stride
    tier_SS = np.full((plan.pp, plan.pp), len(setup.tiers_TF) - 1)
    for tier in range(len(setup.tiers_TF) - 2, -1, -1):
        domain = first // int(setup.tiers_TF[tier, 0])
        tier_SS[domain[:, None] == domain[None, :]] = tier
    resource_SS = (np.arange(plan.pp)[:, None] * len(setup.tiers_TF) + tier_SS).astype(np.int32)
    return resource_SS, nbytes / setup.tiers_TF[tier_SS, 1], setup.tiers_TF[tier_SS, 2]


def _groups(setup: Setup, plan: Parallelism, layer: LayerTime) -> list[tuple[float, float, float, float]]:
    """(parameters of a layer, ranks that shard them, stride, ranks in all) of dense and of expert parameters."""
    replicas = float(plan.dp * plan.cp)
    shard = float(plan.shard or replicas) if plan.zero else replicas
    stride = float(plan.tp * (plan.pp if plan.order == DP_OUTERMOST else 1))
    experts = max(1.0, replicas * plan.tp / (plan.ep * plan.etp))
    parts = [(layer.params, shard, stride, replicas)]
    if layer.expert_params > 0:
        parts.append((layer.expert_params, min(shard, experts), stride * max(1.0, replicas / experts), experts))
    return [part for part in parts if part[3] > 1]


def _sharded_parameters(setup: Setup, plan: Parallelism, layer: LayerTime) -> tuple[float, float]:
    """(gather, scatter) seconds per layer and block when parameters are sharded (ZeRO 3); else 0."""
    if plan.zero < 3:
        return 0.0, 0.0
    gather_s = scatter_s = 0.0
    for count, size, stride, whole in _groups(setup, plan, layer):
        gather_s += phase_s(setup.tiers_TF, count * setup.job.parameter_bytes, size, stride, plan.reduction)
        scatter_s += phase_s(setup.tiers_TF, count * setup.stack.reduce_bytes, size, stride, plan.reduction)
        if whole > size:
            outer_bytes = count * setup.stack.reduce_bytes / size
            scatter_s += all_reduce_s(setup.tiers_TF, outer_bytes, whole / size, stride * size, plan.reduction)
    return gather_s, scatter_s


def _data_parallel(setup: Setup, plan: Parallelism, layer: LayerTime) -> tuple[Any, Any]:
    """Legs of the gradient reduction and of the parameter gather of one chunk, per stage (ZeRO 0 to 2)."""
    if plan.zero == 3 or plan.dp * plan.cp <= 1:
        return (), ()
    stages = split_layers(setup.model_numbers.layers, float(plan.pp), float(plan.chunks))
    layers = stages.per_chunk if plan.pp > 1 else setup.model_numbers.layers / plan.chunks
    model = setup.model_numbers
    edges = np.zeros(plan.pp)
    edges[0] += model.embedding_params / plan.tp
    edges[-1] += model.head_params / plan.tp
    reduce_S, gather_S = [], []
    for s in range(plan.pp):
        reduce: list[Phase] = []
        gather: list[Phase] = []
        for index, (count, size, stride, whole) in enumerate(_groups(setup, plan, layer)):
            held = count * layers + (edges[s] / plan.chunks if index == 0 else 0.0)
            wire = held * setup.stack.reduce_bytes
            reduce.append(_leg(setup, plan, s, wire, size, stride, 1.0))
            if whole > size:
                reduce.append(_leg(setup, plan, s, wire / size, whole / size, stride * size, 2.0))
            moved = wire if plan.zero == 0 else held * setup.job.parameter_bytes
            gather.append(_leg(setup, plan, s, moved, size, stride, 1.0))
        reduce_S.append(tuple(reduce + gather if plan.zero == 0 else reduce))
        gather_S.append(tuple(() if plan.zero == 0 else gather))
    return tuple(reduce_S), tuple(gather_S)


def _leg(
    setup: Setup, plan: Parallelism, stage: int, nbytes: float, size: float, stride: float, phases: float
) -> Phase:
    """A collective as the time it keeps the stage's stream to its outermost tier, and its latency."""
    latency_s = phases * phase_s(setup.tiers_TF, 0.0, size, stride, plan.reduction)
    total_s = phases * phase_s(setup.tiers_TF, nbytes, size, stride, plan.reduction)
    tier = outer_tier(setup.tiers_TF, size, stride)
    return Phase(stage * len(setup.tiers_TF) + tier, float(total_s - latency_s), float(latency_s))
