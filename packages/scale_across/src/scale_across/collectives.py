"""Times of collective operations over a hierarchy of network tiers (alpha-beta model).

A tier is a row of `tiers_TF`: [gpus in one domain, bytes/s per GPU, latency in s], innermost first; a message between
two GPUs uses the innermost tier whose domain holds both. A group is `size` ranks, `stride` GPUs apart, laid out
densely, so of a domain of D GPUs it holds min(size, D / stride) members, each with its own port. Conventions:

- `nbytes` is the size of the whole vector: what every rank holds after an all-gather or before a reduce-scatter.
- A ring over domains uses as many channels as members share a domain, so its bandwidth at a tier is that of one
  port times the members inside the domain below (what NCCL's rings reach), and no more than the tiers below give.
- Latency adds up along the path of the last chunk: once around the ring per phase, far hops included, so it grows with
  the number of domains that the ring visits.

Sources: Thakur, Rabenseifner, Gropp 2005 (ring, recursive halving); Sanders, Speck, Traeff 2009 (two trees).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scale_across.jit import formula

GPUS, BYTES_PER_S, LATENCY_S = 0, 1, 2
"""Columns of a tier table."""
RING, HIERARCHICAL = 0, 1
"""How reductions cross tiers: one flat ring, or reduce-scatter inside, all-reduce across, all-gather inside."""

Tiers = npt.NDArray[np.float64]


@formula
def members(tiers_TF: Tiers, tier: int, size: float, stride: float) -> float:
    """Members of a group inside one domain of `tier` (at least 1); tier -1 is the GPU itself."""
    if tier < 0:
        return 1.0
    return max(1.0, min(size, tiers_TF[tier, 0] / stride))


@formula
def outer_tier(tiers_TF: Tiers, size: float, stride: float) -> int:
    """The innermost tier whose domain holds the whole group; the last tier if none does."""
    for tier in range(len(tiers_TF)):
        if tiers_TF[tier, 0] >= size * stride:
            return tier
    return len(tiers_TF) - 1


@formula
def ring_phase_s(tiers_TF: Tiers, nbytes: float, size: float, stride: float) -> float:
    """Seconds of a reduce-scatter or all-gather as one flat ring: (n-1)/n x bytes / bandwidth + a lap of latency."""
    if size <= 1:
        return 0.0
    last = outer_tier(tiers_TF, size, stride)
    bandwidth = math.inf
    latency_s = 0.0
    inside = 1.0
    domains = size
    for tier in range(last + 1):
        here = members(tiers_TF, tier, size, stride)
        if tier == last:
            here = size
        if here > inside:
            bandwidth = min(bandwidth, tiers_TF[tier, 1] * inside)
            outer_domains = size / here if tier < last else 0.0
            latency_s += (domains - outer_domains) * tiers_TF[tier, 2]
            domains = outer_domains
        inside = here
    return (size - 1) / size * nbytes / bandwidth + latency_s * (size - 1) / size


@formula
def hierarchical_phase_s(tiers_TF: Tiers, nbytes: float, size: float, stride: float) -> float:
    """Seconds of a reduce-scatter or all-gather level by level: inside a domain first, then across on the rest."""
    if size <= 1:
        return 0.0
    last = outer_tier(tiers_TF, size, stride)
    total_s = 0.0
    inside = 1.0
    for tier in range(last + 1):
        here = size if tier == last else members(tiers_TF, tier, size, stride)
        if here > inside:
            across = here / inside
            total_s += (across - 1) / across * (nbytes / inside) / tiers_TF[tier, 1] + (across - 1) * tiers_TF[tier, 2]
        inside = here
    return total_s


@formula
def phase_s(tiers_TF: Tiers, nbytes: float, size: float, stride: float, algorithm: int) -> float:
    """Reduce-scatter or all-gather of `nbytes` by the given algorithm (RING or HIERARCHICAL)."""
    if algorithm == 1:
        return hierarchical_phase_s(tiers_TF, nbytes, size, stride)
    return ring_phase_s(tiers_TF, nbytes, size, stride)


@formula
def all_reduce_s(tiers_TF: Tiers, nbytes: float, size: float, stride: float, algorithm: int) -> float:
    """Reduce-scatter followed by all-gather."""
    return 2 * phase_s(tiers_TF, nbytes, size, stride, algorithm)


@formula
def all_to_all_s(tiers_TF: Tiers, nbytes: float, size: float, stride: float) -> float:
    """Every rank sends `nbytes` in all, an equal part to each of the `size` ranks (itself included, which is free).

    The share for ranks outside a domain leaves through each GPU's own port; messages are sent at once, so the farthest
    latency counts once.
    """
    if size <= 1:
        return 0.0
    last = outer_tier(tiers_TF, size, stride)
    slowest_s = 0.0
    inside = 1.0
    for tier in range(last + 1):
        here = size if tier == last else members(tiers_TF, tier, size, stride)
        if here > inside:
            slowest_s = max(slowest_s, nbytes * (size - inside) / size / tiers_TF[tier, 1])
        inside = here
    return slowest_s + tiers_TF[last, 2]


@formula
def point_to_point_s(tiers_TF: Tiers, nbytes: float, tier: int) -> float:
    """One message across `tier`."""
    return nbytes / tiers_TF[tier, 1] + tiers_TF[tier, 2]


# -- single-tier algorithms, for comparison and for the network study ----------------------------------------------


@formula
def tree_all_reduce_s(nbytes: float, size: float, bytes_per_s: float, latency_s: float) -> float:
    """Double binary tree (each rank is a leaf of one tree): reduce up, broadcast down, pipelined; full bandwidth."""
    if size <= 1:
        return 0.0
    return 2 * nbytes / bytes_per_s * (size - 1) / size + 2 * math.ceil(math.log2(size)) * latency_s


@formula
def halving_doubling_all_reduce_s(nbytes: float, size: float, bytes_per_s: float, latency_s: float) -> float:
    """Recursive halving, then doubling (Rabenseifner): the ring's bytes with 2 log2(n) latencies."""
    if size <= 1:
        return 0.0
    return 2 * (size - 1) / size * nbytes / bytes_per_s + 2 * math.ceil(math.log2(size)) * latency_s


@formula
def bidirectional_ring_all_reduce_s(nbytes: float, size: float, bytes_per_s: float, latency_s: float) -> float:
    """Half of the data each way round: half of the bytes per direction, half of a lap per phase."""
    if size <= 1:
        return 0.0
    return (size - 1) / size * nbytes / bytes_per_s + 2 * math.ceil((size - 1) / 2) * latency_s


@formula
def broadcast_s(nbytes: float, size: float, bytes_per_s: float, latency_s: float, chunks: float) -> float:
    """A chain of `size` ranks, the data in `chunks` pieces: (n - 2 + chunks) pieces pass the last link."""
    if size <= 1:
        return 0.0
    return (size - 2 + chunks) * (nbytes / chunks / bytes_per_s) + (size - 1) * latency_s


def chunked_hierarchical_all_reduce_s(
    dimensions: Sequence[tuple[int, float, float]],
    nbytes: float,
    chunks: int,
    reduce_bytes_per_s: float = math.inf,
    endpoint_s: float = 0.0,
) -> float:
    """Seconds of an all-reduce of `chunks` pieces that follow one another through the dimensions of a network.

    Each piece is reduce-scattered in dimension 0, then 1 and so on, all-reduced in the last, and gathered on the way
    back, by rings. Pieces overlap across dimensions: one passes alone, the others follow at the pace of the slowest
    phase. NeMo's chunked inter-site reduction has this form, and so has ASTRA-sim 2 with its
    `preferred-dataset-splits` of 4, where a switch is two hops of latency, GB means 2^30 bytes, and every reducing step
    also reads two buffers and writes one in local memory (1600 GB/s, GB = 10^9) and waits twice for `endpoint-delay`.

    Args:
        dimensions: (ranks, bytes/s per rank, latency of one step in s), innermost first.
        nbytes: of the whole vector.
        chunks: number of pieces.
        reduce_bytes_per_s: local memory bandwidth of a reducing step.
        endpoint_s: fixed cost before and after a reducing step.
    """
    phases_s = []
    piece = nbytes / chunks
    for index, (ranks, bytes_per_s, latency_s) in enumerate(dimensions):
        part = piece / ranks
        wire_s = (ranks - 1) * (part / bytes_per_s + latency_s)
        reduce_s = (ranks - 1) * (3.0 * part / reduce_bytes_per_s + 2.0 * endpoint_s)
        if index == len(dimensions) - 1:
            phases_s.append(2.0 * wire_s + reduce_s)
        else:
            phases_s += [wire_s + reduce_s, wire_s]
        piece = part
    return sum(phases_s) + (chunks - 1) * max(phases_s)
