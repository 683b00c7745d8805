"""Formulas around the layers: how stages are cut, what crosses them, what data parallelism sends, host stalls."""

from __future__ import annotations

import math
from typing import NamedTuple

from scale_across.collectives import Tiers, all_reduce_s, phase_s, point_to_point_s
from scale_across.compute import StackNumbers
from scale_across.jit import formula
from scale_across.parallelism import Parallelism


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
def round_trip_period_s(
    tiers_TF: Tiers, nbytes: float, pp: float, stride: float, chunks: float, middle_s: float, last_s: float
) -> float:
    """Least period of a microbatch that the messages over each tier allow.

    A stage's outgoing stream carries one message per chunk and direction. And of the boundaries of a tier the last has
    least time: with 1F1B the stage before the last n - 1 has n microbatches under way, so n periods cover the compute
    of n stages and one message each way; interleaved, its last chunk has 2 n - 1 chunk blocks under way.
    """
    least_s = 0.0
    for tier in range(1, len(tiers_TF)):
        inside = tiers_TF[tier - 1, 0] / stride  # stages of a domain
        behind = pp - math.ceil(math.floor((pp - 1.0) / inside) * inside)
        if behind < pp:
            n = behind + 1.0
            wire_s = chunks * nbytes / tiers_TF[tier, 1]
            trip_s = (n - 1.0) * middle_s + last_s + 2.0 * (wire_s + chunks * tiers_TF[tier, 2])
            both_ways = 2.0 if inside <= 1.0 and pp > 2 else 1.0
            least_s = max(least_s, both_ways * wire_s, trip_s / (n if chunks == 1 else 2.0 * n - 1.0))
    return least_s


@formula
def stalled_s(busy_s: float, launch_s: float) -> float:
    """Seconds of work that keeps the GPU busy for `busy_s` and the host for `launch_s`.

    At least the longer of the two. Near equality it is more, since short kernels wait for the host while long ones
    leave it idle: the root of the sum of squares, which vTrain's single-node cells ask for (fitted exponent 2.0).
    """
    return math.sqrt(busy_s * busy_s + launch_s * launch_s)


@formula
def expert_stride(plan: Parallelism) -> float:
    """GPUs between neighbours of an expert group: it spans TP / expert TP, then CP, then DP ranks.

    With DP outermost the pipeline lies between two DP ranks; then the whole group is priced at that distance.
    """
    inside = plan.cp * plan.tp // plan.etp
    return float(plan.etp * (plan.pp if plan.order == 1 and plan.ep > inside else 1))


@formula
def data_parallel_s(
    plan: Parallelism,
    stack: StackNumbers,
    tiers_TF: Tiers,
    parameter_bytes: float,
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
        pieces = buckets if plan.zero == 3 else 1.0
        count = count / pieces
        reduce_s += pieces * phase_s(tiers_TF, count * wire, size, step, reduction)
        gathered = count * (wire if plan.zero == 0 else parameter_bytes)
        gather_s += pieces * phase_s(tiers_TF, gathered, size, step, reduction)
        outer = whole / size
        if outer > 1:
            reduce_s += pieces * all_reduce_s(tiers_TF, count * wire / size, outer, step * size, reduction)
    if plan.zero == 3:  # every layer of every microbatch has its own: forward a gather, backward one more and a scatter
        hidden = stack.dp_overlap * microbatches
        forward_sent_s, backward_sent_s = microbatches * gather_s, microbatches * (gather_s + reduce_s)
        exposed_s = max(forward_sent_s - hidden * forward_s, forward_sent_s / (buckets * microbatches))
        return exposed_s + max(backward_sent_s - hidden * backward_s, backward_sent_s / (buckets * microbatches))
    if stack.dp_overlap <= 0:
        return reduce_s + gather_s
    exposed_s = max(reduce_s - stack.dp_overlap * backward_s, reduce_s / buckets)
    return exposed_s + max(gather_s - stack.dp_overlap * forward_s, gather_s / buckets)
