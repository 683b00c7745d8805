"""Seconds of one pipeline block, and what data parallelism sends for it: the formulas that the event simulation and its
lower bound share, so that the bound holds for the very numbers that are simulated.
"""

from __future__ import annotations

from typing import NamedTuple

from scale_across.collectives import Tiers, all_reduce_s, outer_tier, phase_s
from scale_across.compute import GpuNumbers, StackNumbers, head_s
from scale_across.jit import formula
from scale_across.parallelism import Parallelism
from scale_across.step import JobNumbers, LayerTime, ModelNumbers
from scale_across.traffic import stalled_s


class BlockTime(NamedTuple):
    """One microbatch through one virtual stage."""

    forward_s: float
    backward_s: float
    """Both gradients; `LayerTime.weight_share` of it are weight gradients."""


class Sharding(NamedTuple):
    """Gathers and scatters of one layer in one block, when parameters are sharded (ZeRO 3)."""

    gathered_s: float
    scattered_s: float


class Group(NamedTuple):
    """The ranks that hold copies of some parameters."""

    params: float
    """Per layer and rank."""
    size: float
    """Ranks that shard them (all of them without ZeRO)."""
    stride: float
    whole: float
    """Ranks in all; 1: nothing to reduce."""


class Leg(NamedTuple):
    """A collective on the stream to its outermost tier."""

    tier: int
    occupied_s: float
    latency_s: float


@formula
def edges_s(
    plan: Parallelism, model: ModelNumbers, gpu: GpuNumbers, stack: StackNumbers, job: JobNumbers
) -> tuple[float, float]:
    """(embedding, head with loss) seconds of a microbatch, forward and backward together."""
    tokens = plan.microbatch * job.seq / plan.cp
    embed_s = 6.0 * tokens * model.hidden * 2.0 / (gpu.bytes_per_s * gpu.memory_fraction) + 6.0 * gpu.gap_s
    return embed_s, head_s(gpu, stack, model.hidden, model.vocab, tokens, float(plan.tp)) + 12.0 * gpu.gap_s


@formula
def block_s(
    plan: Parallelism,
    stack: StackNumbers,
    layer: LayerTime,
    sharding: Sharding,
    layers: float,
    edge_s: float,
    head: float,
) -> BlockTime:
    """`layers` layers and `edge_s` of embedding or head; `head` is 1 where the head is, whose launches count too."""
    again = 2.0 if plan.recompute == 2 else 0.0
    hidden_share = stack.tp_backward_overlap * (0.5 if plan.sp > 0 else 1.0)
    tp_forward_s = layer.tp_s * 2.0 / (2.0 + 2.0 * (1.0 - hidden_share) + again)
    ep_forward_s = layer.ep_s * 2.0 / (4.0 + again)
    comm_s, comm_forward_s = layer.tp_s + layer.cp_s + layer.ep_s, tp_forward_s + ep_forward_s + layer.cp_s / 3.0
    forward_s = layers * (layer.forward_s + comm_forward_s) + edge_s / 3.0
    backward_s = layers * (layer.backward_s + comm_s - comm_forward_s) + edge_s * 2.0 / 3.0
    busy_s = forward_s + backward_s
    launch_s = (layers * layer.kernels + 20.0 * head) * stack.dispatch_s
    stall = stalled_s(busy_s, launch_s) / busy_s if busy_s > 0 else 1.0
    forward_s, backward_s = forward_s * stall, backward_s * stall
    overlap = stack.dp_overlap
    gathered_s, scattered_s = layers * sharding.gathered_s, layers * sharding.scattered_s
    return BlockTime(
        forward_s + max(gathered_s - overlap * forward_s, 0.0),
        backward_s + max(gathered_s + scattered_s - overlap * backward_s, 0.0),
    )


@formula
def group(plan: Parallelism, layer: LayerTime, expert: int) -> Group:
    """Who shares the dense (0) or the expert (1) parameters of a layer."""
    replicas = float(plan.dp) * plan.cp
    shard = float(plan.shard) if plan.shard > 0 and plan.zero > 0 else replicas
    stride = float(plan.tp) * (plan.pp if plan.order == 1 else 1)
    if expert == 0:
        return Group(layer.params, shard, stride, replicas)
    if layer.expert_params <= 0:
        return Group(0.0, 1.0, stride, 1.0)
    experts = max(1.0, replicas * plan.tp / (float(plan.ep) * plan.etp))
    return Group(layer.expert_params, min(shard, experts), stride * max(1.0, replicas / experts), experts)


@formula
def sharding_s(plan: Parallelism, stack: StackNumbers, layer: LayerTime, tiers_TF: Tiers, job: JobNumbers) -> Sharding:
    """What ZeRO 3 moves per layer and block; nothing otherwise."""
    gather_s = scatter_s = 0.0
    if plan.zero == 3:
        for expert in range(2):
            g = group(plan, layer, expert)
            if g.whole > 1:
                gather_s += phase_s(tiers_TF, g.params * job.parameter_bytes, g.size, g.stride, plan.reduction)
                scatter_s += phase_s(tiers_TF, g.params * stack.reduce_bytes, g.size, g.stride, plan.reduction)
                if g.whole > g.size:
                    sent = g.params * stack.reduce_bytes / g.size
                    scatter_s += all_reduce_s(tiers_TF, sent, g.whole / g.size, g.stride * g.size, plan.reduction)
    return Sharding(gather_s, scatter_s)


@formula
def leg(plan: Parallelism, tiers_TF: Tiers, nbytes: float, size: float, stride: float, phases: float) -> Leg:
    """A collective as the time it keeps the stage's stream to its outermost tier, and its latency."""
    latency_s = phases * phase_s(tiers_TF, 0.0, size, stride, plan.reduction)
    total_s = phases * phase_s(tiers_TF, nbytes, size, stride, plan.reduction)
    return Leg(outer_tier(tiers_TF, size, stride), total_s - latency_s, latency_s)


@formula
def reduce_leg(
    plan: Parallelism, stack: StackNumbers, layer: LayerTime, tiers_TF: Tiers, expert: int, layers: float, extra: float
) -> tuple[Leg, Leg]:
    """(reduce-scatter over the shards, all-reduce of a shard over its copies) of a chunk.

    `extra` are its dense parameters besides the layers.
    """
    g = group(plan, layer, expert)
    wire = (g.params * layers + (extra if expert == 0 else 0.0)) * stack.reduce_bytes
    first = leg(plan, tiers_TF, wire if g.whole > 1 else 0.0, g.size, g.stride, 1.0)
    return first, leg(plan, tiers_TF, wire / g.size, g.whole / g.size, g.stride * g.size, 2.0)


@formula
def gather_leg(
    plan: Parallelism,
    stack: StackNumbers,
    layer: LayerTime,
    tiers_TF: Tiers,
    job: JobNumbers,
    expert: int,
    layers: float,
    extra: float,
) -> Leg:
    """All-gather of a chunk's parameters; without ZeRO the second half of the gradients' all-reduce."""
    g = group(plan, layer, expert)
    held = g.params * layers + (extra if expert == 0 else 0.0)
    moved = held * (stack.reduce_bytes if plan.zero == 0 else job.parameter_bytes)
    return leg(plan, tiers_TF, moved if g.whole > 1 else 0.0, g.size, g.stride, 1.0)
