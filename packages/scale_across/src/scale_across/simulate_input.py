"""What a simulated step does: a plan's block durations, messages and collectives, from the formulas of the estimate.

    schedule, work, policy = candidate(setup, Parallelism(tp=8, pp=16, dp=64, chunks=8))
    simulate(schedule, work, policy).step_s

The same seconds as in `step.py`, laid out in time instead of summed: what is hidden, what queues and how long the
pipeline takes to fill then follow from the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scale_across.blocks import Leg, block_s, edges_s, gather_leg, reduce_leg, sharding_s
from scale_across.estimate import Setup
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import DP_OUTERMOST, Parallelism
from scale_across.schedule import Schedule
from scale_across.schedules_static import interleaved
from scale_across.simulate_tables import Phase, Work
from scale_across.step import LayerTime, average_layer, estimate_layers
from scale_across.traffic import split_layers


@dataclass(frozen=True)
class StageSites:
    """Which site holds each stage, and what a message between stages of two sites gets."""

    site_S: tuple[int, ...]
    hops: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(site, site) → (bytes/s of one flow, latency in s)."""


def candidate(
    setup: Setup, plan: Parallelism, schedule: Schedule | None = None, policy: OverlapPolicy | None = None
) -> tuple[Schedule, Work, OverlapPolicy]:
    """Schedule, work and policy of one plan; by default (interleaved) 1F1B and what the software stack overlaps."""
    if schedule is None:
        microbatches = int(setup.job.global_batch) // (plan.dp * plan.microbatch)
        schedule = interleaved(plan.pp, microbatches, plan.chunks)
    return schedule, work_of(setup, plan, int(schedule.device_of_virtual_V[-1])), policy or policy_of(setup, plan)


def policy_of(setup: Setup, plan: Parallelism) -> OverlapPolicy:
    """What the software stack overlaps; gradients are reduced layer by layer."""
    layers = split_layers(setup.model_numbers.layers, float(plan.pp), float(plan.chunks)).per_chunk
    if plan.pp == 1:
        layers = setup.model_numbers.layers / plan.chunks
    overlapped = setup.stack.dp_overlap > 0
    return OverlapPolicy(
        send_exposed=1.0 - setup.stack.pp_overlap,
        buckets=max(1, int(layers)) if overlapped else 1,
        reduce_overlap=overlapped,
    )


def work_of(
    setup: Setup,
    plan: Parallelism,
    head: int | None = None,
    sites: StageSites | None = None,
    slices: int = 1,
    price: float = 0.0,
) -> Work:
    """Durations and transfers of a plan; every stage has one outgoing stream per tier of the network.

    Args:
        head: stage that holds the last virtual stage; by default the last.
        sites: who sits where, when what crosses sites differs from the outermost tier.
        slices, price: sequence slices of a microbatch, and how much longer their blocks take in all.
    """
    layer = layer_time(setup, plan)
    tiers = len(setup.tiers_TF)
    names = tuple(f"stage {s}, {name}" for s in range(plan.pp) for name in setup.tier_names)
    resource_SS, occupied_SS, latency_SS = _messages(setup, plan, sites)
    reduce_S, gather_S = _data_parallel(setup, plan, layer, plan.pp - 1 if head is None else head)
    estimate = estimate_layers(plan, layer, setup.model_numbers, setup.gpu, setup.stack, setup.tiers_TF, setup.job)
    return Work(
        duration_KV=durations(setup, plan, layer) * (1.0 + price) / slices,
        resource_SS=resource_SS,
        occupied_s_SS=occupied_SS / slices,
        latency_s_SS=latency_SS,
        resources=names,
        replicas_R=np.ones(plan.pp * tiers, np.int32),
        reduce_S=reduce_S,
        gather_S=gather_S,
        optimizer_s=estimate.optimizer_s,
    )


def layer_time(setup: Setup, plan: Parallelism) -> LayerTime:
    """One microbatch through the average layer."""
    return average_layer(plan, setup.kinds_KF, setup.model_numbers, setup.gpu, setup.stack, setup.tiers_TF, setup.job)


def layers_per_virtual(setup: Setup, plan: Parallelism) -> npt.NDArray[np.float64]:
    """Layers of every virtual stage; embedding and head may take a layer's place."""
    layers, virtuals = setup.model_numbers.layers, plan.pp * plan.chunks
    stages = split_layers(layers, float(plan.pp), float(plan.chunks))
    layers_V = np.full(virtuals, stages.per_chunk if plan.pp > 1 else layers / virtuals)
    if plan.pp > 1:
        layers_V[0] -= stages.middle - stages.first
        layers_V[-1] -= stages.middle - stages.last
    return layers_V


def durations(setup: Setup, plan: Parallelism, layer: LayerTime) -> npt.NDArray[np.float64]:
    """Seconds of F, D, W and B by virtual stage: layers, embedding and head, collectives and waits for the host."""
    layers_V = layers_per_virtual(setup, plan)
    embed_s, head_s = edges_s(plan, setup.model_numbers, setup.gpu, setup.stack, setup.job)
    sharding = sharding_s(plan, setup.stack, layer, setup.tiers_TF, setup.job)
    last = len(layers_V) - 1
    kinds = {}  # first, middle, last: computed once each
    blocks = []
    for v, layers in enumerate(layers_V.tolist()):
        kind = (v == 0, v == last)
        if kind not in kinds:
            edge_s = embed_s * kind[0] + head_s * kind[1]
            kinds[kind] = block_s(plan, setup.stack, layer, sharding, layers, edge_s, float(kind[1]))
        blocks.append(kinds[kind])
    forward_V = np.array([block.forward_s for block in blocks])
    both_V = np.array([block.backward_s for block in blocks])
    weight_V = both_V * layer.weight_share
    return np.stack([forward_V, both_V - weight_V, weight_V, both_V])


def _messages(setup: Setup, plan: Parallelism, sites: StageSites | None) -> tuple[Any, Any, Any]:
    """[stage, stage] outgoing stream, seconds on it, latency: each pair at the innermost tier that holds both."""
    stride = plan.tp * plan.cp * (1 if plan.order == DP_OUTERMOST else plan.dp)
    split = plan.tp if setup.stack.scatter_gather > 0 or plan.sp > 0 else 1
    nbytes = plan.microbatch * setup.job.seq / plan.cp * setup.model_numbers.hidden * 2.0 / split
    first = np.arange(plan.pp) * stride
    outermost = len(setup.tiers_TF) - 1
    tier_SS = np.full((plan.pp, plan.pp), outermost)
    for tier in range(outermost - 1, -1, -1):
        domain = first // int(setup.tiers_TF[tier, 0])
        tier_SS[domain[:, None] == domain[None, :]] = tier
    if sites is not None and sites.hops:
        at = np.asarray(sites.site_S)
        tier_SS = np.where(at[:, None] == at[None, :], np.minimum(tier_SS, outermost - 1), outermost)
    occupied_SS, latency_SS = nbytes / setup.tiers_TF[tier_SS, 1], setup.tiers_TF[tier_SS, 2]
    if sites is not None:
        for (a, b), (bytes_per_s, latency_s) in sites.hops.items():
            here = (np.asarray(sites.site_S) == a)[:, None] & (np.asarray(sites.site_S) == b)[None, :]
            occupied_SS[here], latency_SS[here] = nbytes / bytes_per_s, latency_s
    resource_SS = (np.arange(plan.pp)[:, None] * len(setup.tiers_TF) + tier_SS).astype(np.int32)
    return resource_SS, occupied_SS, latency_SS


def _data_parallel(setup: Setup, plan: Parallelism, layer: LayerTime, head: int) -> tuple[Any, Any]:
    """Legs of the gradient reduction and of the parameter gather of one chunk, per stage (ZeRO 0 to 2).

    `head` is the stage that holds the head. Embedding and head are spread over the chunks of their stage.
    """
    if plan.zero == 3 or plan.dp * plan.cp <= 1:
        return (), ()
    stages = split_layers(setup.model_numbers.layers, float(plan.pp), float(plan.chunks))
    layers = stages.per_chunk if plan.pp > 1 else setup.model_numbers.layers / plan.chunks
    edges = np.zeros(plan.pp)
    edges[0] += setup.model_numbers.embedding_params / plan.tp / plan.chunks
    edges[head] += setup.model_numbers.head_params / plan.tp / plan.chunks
    width, tiers = len(setup.tiers_TF), setup.tiers_TF
    reduce_S: list[tuple[Phase, ...]] = []
    gather_S: list[tuple[Phase, ...]] = []
    known: dict[float, tuple[list[Leg], list[Leg]]] = {}  # all stages but the first and the last are alike
    for s, extra in enumerate(edges.tolist()):
        if extra not in known:
            known[extra] = [], []
            for expert in (0, 1) if layer.expert_params > 0 else (0,):
                known[extra][0].extend(reduce_leg(plan, setup.stack, layer, tiers, expert, layers, extra))
                known[extra][1].append(gather_leg(plan, setup.stack, layer, tiers, setup.job, expert, layers, extra))
        reduce, gather = known[extra]
        legs = [*reduce, *gather] if plan.zero == 0 else reduce
        for into, found in ((reduce_S, legs), (gather_S, gather if plan.zero else [])):
            into.append(
                tuple(
                    Phase(s * width + leg.tier, float(leg.occupied_s), float(leg.latency_s))
                    for leg in found
                    if leg.occupied_s + leg.latency_s > 0
                )
            )
    return tuple(reduce_S), tuple(gather_S)
