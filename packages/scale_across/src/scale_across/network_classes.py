"""What shares a link and what is sent at all: priority classes, oversubscription, compression, outer optimizers.

Rates are in 10^9 bits per second. DiLoCo and Streaming DiLoCo change the training algorithm; everything else only
changes when bytes arrive (compression also what they say, with the error bound stated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def strict_priority_gbps(capacity_gbps: float, demands_gbps: Sequence[float]) -> list[float]:
    """Classes in order of priority, first first: each takes what it wants of what is left (IEEE 802.1Q)."""
    left = capacity_gbps
    given = []
    for demand in demands_gbps:
        given.append(min(demand, left))
        left -= given[-1]
    return given


def weighted_classes_gbps(capacity_gbps: float, demands_gbps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Deficit-weighted round robin (IEEE 802.1Qaz ETS): shares by weight, and what one class leaves goes to the others.

    Weighted max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    given = [0.0] * len(demands_gbps)
    waiting = {i for i, demand in enumerate(demands_gbps) if demand > 0}
    left = capacity_gbps
    while waiting and left > 1e-12 * capacity_gbps:
        unit = left / sum(weights[i] for i in waiting)
        met = {i for i in waiting if demands_gbps[i] <= unit * weights[i] * (1 + 1e-12)}
        for i in met or waiting:
            given[i] = demands_gbps[i] if met else unit * weights[i]
            left -= given[i]
        waiting = waiting - met if met else set()
    return given


def oversubscribed_gbps(port_gbps: float, ratio: float, crossing: float = 1.0) -> float:
    """Per GPU when a share `crossing` of its traffic goes up through a tier with ratio:1 less capacity than ports.

    The rest stays below and takes the port: min(port, port / (ratio x crossing)).
    """
    return port_gbps if crossing <= 0 else min(port_gbps, port_gbps / (ratio * crossing))


@dataclass(frozen=True)
class Compression:
    """Numbers of fewer bits on the wire, one scale per block."""

    name: str
    bits: float
    block: int
    """Values that share a scale; 0: no scale."""
    scale_bits: float
    relative_to_value: float
    """Worst rounding error over the value itself, once per quantisation (floating formats, in normal range)."""
    relative_to_block: float
    """Worst rounding error over the block's largest value (integer formats)."""

    @property
    def bits_per_value(self) -> float:
        """Scales included."""
        return self.bits + (self.scale_bits / self.block if self.block else 0.0)

    def ratio(self, bits_before: float) -> float:
        """How many times fewer bytes than with `bits_before` per value."""
        return bits_before / self.bits_per_value

    def codec_s(self, values: float, memory_bytes_per_s: float, bytes_before: float = 4.0) -> float:
        """Encode and decode, memory-bound: the plain values and the compressed ones move through memory once each."""
        return 2.0 * values * (bytes_before + self.bits_per_value / 8) / memory_bytes_per_s

    def error_bound(self, quantisations: int = 1) -> float:
        """Relative error after so many quantisations of one value: n - 1 in a ring's reduce-scatter, 1 when all
        sends go to the owner, who sums in fp32 (all-to-all). Errors add up to first order.
        """
        return quantisations * max(self.relative_to_value, self.relative_to_block)


COMPRESSIONS = {
    c.name: c
    for c in (
        Compression("fp32", 32, 0, 0, 2.0**-24, 0.0),
        Compression("bf16", 16, 0, 0, 2.0**-8, 0.0),  # 7 stored bits of mantissa, rounded to nearest: half of 2^-7
        Compression("fp8-e4m3", 8, 128, 32, 2.0**-4, 0.0),  # 3 bits: half of 2^-3 (Micikevicius et al. 2022)
        Compression("fp8-e5m2", 8, 128, 32, 2.0**-3, 0.0),
        Compression("int4", 4, 64, 16, 0.0, 1 / 14),  # -7 ... 7 over the largest value: half a step of 1/7
    )
}


@dataclass(frozen=True)
class OuterSync:
    """What an outer optimizer sends, per inner step. Not the same training semantics as synchronous SGD."""

    bytes_per_step: float
    peak_bytes: float
    """In one synchronisation."""
    exposed_s_per_step: float
    changes_algorithm: bool = True


def all_reduce_bytes(nbytes: float, sites: int) -> float:
    """Sent by each of `sites` in a bandwidth-optimal all-reduce: 2 (n - 1) / n of the vector."""
    return 2.0 * (sites - 1) / sites * nbytes


def diloco(params: float, sites: int, inner_steps: int, bits: float, bytes_per_s: float, latency_s: float) -> OuterSync:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): outer gradients all-reduced every `inner_steps`, all wait."""
    sent = all_reduce_bytes(params * bits / 8, sites)
    return OuterSync(
        sent / inner_steps, sent, (sent / bytes_per_s + 2 * (sites - 1) * latency_s) / inner_steps if sites > 1 else 0.0
    )


def streaming_diloco(
    params: float,
    sites: int,
    inner_steps: int,
    fragments: int,
    overlap_steps: float,
    step_s: float,
    bits: float,
    bytes_per_s: float,
    latency_s: float,
) -> OuterSync:
    """Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): fragments take turns, each sent behind compute.

    Each of `fragments` is synchronised every `inner_steps`, at most `overlap_steps` behind; peak bytes fall by the
    number of fragments, and time is exposed only where a fragment takes longer than its overlap.
    """
    sent = all_reduce_bytes(params * bits / 8, sites) / fragments
    one_s = sent / bytes_per_s + 2 * (sites - 1) * latency_s if sites > 1 else 0.0
    exposed_s = max(0.0, one_s - overlap_steps * step_s, one_s - inner_steps / fragments * step_s)
    return OuterSync(sent * fragments / inner_steps, sent, exposed_s * fragments / inner_steps)


def quantise_int4(values: np.ndarray, block: int = 64) -> np.ndarray:
    """Round each block to -7 ... 7 times (its largest value / 7), as the `int4` entry of COMPRESSIONS describes."""
    padded = np.zeros(-(-len(values) // block) * block, values.dtype)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, block)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    steps = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    return np.asarray((steps * scale).ravel()[: len(values)])
