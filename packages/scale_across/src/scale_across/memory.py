"""Bytes that one GPU must hold: state by ZeRO stage, activations by schedule position, buffers.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), counted tensor by tensor so that grouped
queries, gated activations and experts come out of the same rule.
"""

from __future__ import annotations

from typing import NamedTuple

from scale_across.compute import (
    EXPERTS,
    GATED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SHARED_WIDTH,
    TOP_K,
    VALUE_DIM,
    WIDTH,
    Kinds,
    StackNumbers,
)
from scale_across.jit import formula

RESERVED_BYTES = 2.0 * 2**30
"""Context, libraries and communication buffers of one process."""
FRAGMENTATION = 0.06
"""Share of the activations that the caching allocator loses to fragmentation."""


class MemoryBytes(NamedTuple):
    """The sum that must fit, by part."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    buffers: float


@formula
def layer_activation_bytes(
    stack: StackNumbers,
    kind: Kinds,
    hidden: float,
    microbatch: float,
    seq: float,
    tp: float,
    sp: float,
    cp: float,
    etp: float,
    recompute: int,
) -> float:
    """Bytes that one layer keeps of one microbatch until its backward pass."""
    tokens = microbatch * seq / cp
    split = tp if sp > 0 else 1.0
    if recompute == 2:
        return 2.0 * tokens * hidden / split
    heads = max(1.0, kind[HEADS] / tp)
    keys = max(1.0, kind[KV_HEADS] / tp)
    whole = 2.0 * tokens * hidden * 4.0 / split  # inputs of both norms, and what they pass on
    if stack.flash == 0.0:
        whole += 2.0 * tokens * hidden / split  # two dropout masks of one byte
    projected = (
        2.0 * tokens * (heads * kind[HEAD_DIM] + keys * (kind[HEAD_DIM] + kind[VALUE_DIM]) + heads * kind[VALUE_DIM])
    )
    scores = 5.0 * microbatch * heads * (seq / cp) * seq if stack.flash == 0.0 and recompute == 0 else 0.0
    ups = 2.0 if kind[GATED] > 0 else 1.0
    dense = kind[WIDTH] if kind[EXPERTS] == 0 else kind[SHARED_WIDTH]
    inner = 2.0 * tokens * dense / tp * (ups + 1.0)
    if kind[EXPERTS] > 0:
        inner += 2.0 * tokens * (etp / tp) * kind[TOP_K] * (hidden + kind[WIDTH] / etp * (ups + 1.0))
    return whole + projected + scores + inner


@formula
def held_microbatch_layers(layers_per_chunk: float, pp: float, chunks: float, microbatches: float) -> float:
    """Layers x microbatches whose activations the first stage holds at the worst moment.

    1F1B: pp microbatches. Interleaved (Narayanan et al. 2021): (pp chunks + pp - 1) chunks. Never more than all.
    """
    in_flight = pp * chunks + pp - 1.0 if chunks > 1 else pp
    return min(in_flight, microbatches * chunks) * layers_per_chunk
