"""Seconds that one GPU computes for one microbatch: GEMMs, attention, memory-bound operators, kernel launches.

Mechanisms, in the order in which they matter:

- a GEMM takes max(arithmetic, memory traffic): tiles of 128 x 128 go to the multiprocessors in waves, each tile pays
  a prologue worth `gemm_k0` of depth, and the whole runs at `gemm_fraction` of the peak;
- element-wise operators, norms and unfused softmax move bytes at `memory_fraction` of the memory bandwidth;
- every kernel is followed by a gap, and no microbatch is faster than the host launches its kernels (dispatch floor).

Shapes: m x k times k x n. Everything here is a scalar formula; see `jit.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scale_across.jit import formula


class GpuNumbers(NamedTuple):
    """An accelerator as the formulas need it; made by `hardware.Accelerator.numbers`."""

    flops: float
    """Peak FLOP/s of the compute type."""
    bytes_per_s: float
    sms: float
    memory_bytes: float
    gemm_fraction: float
    gemm_k0: float
    unaligned_fraction: float
    """Of the GEMM rate, when a side is no multiple of 16 bytes (8 half-precision numbers)."""
    memory_fraction: float
    attention_fraction: float
    """Share of the peak that fused attention reaches forward."""
    attention_backward_fraction: float
    gap_s: float


class StackNumbers(NamedTuple):
    """A software stack as the formulas need it; made by `stack.Stack.numbers`. Flags are 0 or 1."""

    dispatch_s: float
    flash: float
    norm_passes: float
    activation_passes: float
    residual_passes: float
    kernels_forward: float
    kernels_backward: float
    selective_attention: float
    selective_gemms: float
    accumulate_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    collective_s: float
    head_passes: float
    tp_overlap: float
    tp_backward_overlap: float
    dp_overlap: float
    pp_overlap: float
    cp_overlap: float
    ep_overlap: float
    scatter_gather: float
    reduce_bytes: float


COUNT, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, Q_LORA, KV_LORA, ROPE_DIM, WINDOW = range(9)
WIDTH, GATED, EXPERTS, TOP_K, SHARED_WIDTH, TENSOR_PARAMS, EXPERT_PARAMS, REPLICATED_PARAMS, CHUNKED = range(9, 18)
"""Columns of `kinds_KF`, one row per distinct layer of a model; made by `estimate.model_numbers`."""
Kinds = npt.NDArray[np.float64]


class BlockTime(NamedTuple):
    """Seconds of one layer for one microbatch on one GPU, communication apart; kernels are counted, not timed."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    attention_s: float
    """Forward attention core, part of `forward_s`."""
    repeat_s: float
    """Forward work that selective recompute repeats."""
    kernels_forward: float
    kernels_backward: float


@formula
def unaligned(side: float) -> bool:
    """Is a matrix side no multiple of 16 bytes (8 half-precision numbers)?"""
    eighths = side * 0.125
    return eighths > math.floor(eighths)


@formula
def gemm_s(gpu: GpuNumbers, batch: float, m: float, n: float, k: float, out_bytes: float) -> float:
    """Seconds of `batch` equal GEMMs in one kernel, half-precision inputs, `out_bytes` per output element; no gap."""
    tiles = batch * math.ceil(m / 128.0) * math.ceil(n / 128.0)
    waves = math.ceil(tiles / gpu.sms)
    rate = gpu.flops * gpu.gemm_fraction
    if unaligned(m) or unaligned(n) or unaligned(k):
        rate *= gpu.unaligned_fraction
    wave_s = 2.0 * 128.0 * 128.0 * (k + gpu.gemm_k0) * gpu.sms / rate
    traffic = batch * (2.0 * (m * k + k * n) + out_bytes * m * n)
    return max(waves * wave_s, traffic / (gpu.bytes_per_s * gpu.memory_fraction))


@formula
def mean_keys(seq: float, window: float, chunked: float) -> float:
    """Keys per query under a causal mask, on average: s/2; sliding window of w < s: w - w^2 / 2s; chunks of w: w/2."""
    if window > 0 and window < seq:
        return window / 2.0 if chunked > 0 else window - window * window / (2.0 * seq)
    return seq / 2.0


@formula
def attention_core_s(
    gpu: GpuNumbers, stack: StackNumbers, kind: Kinds, microbatch: float, seq: float, tp: float, cp: float
) -> tuple[float, float]:
    """(forward, backward) seconds of softmax(q k^T) v for one microbatch: fused (flash), or two GEMMs and a softmax.

    Fused attention does the causal half only; its backward pass recomputes the scores: 5 GEMMs instead of 2.
    Unfused attention computes all scores and passes them through memory: softmax with scale and mask reads and writes
    them (4 bytes per score), dropout reads, writes and keeps a mask (5 bytes); backward has one more read.
    """
    heads = max(1.0, kind[HEADS] / tp)
    if stack.flash > 0:
        flops = (
            2.0
            * microbatch
            * (seq / cp)
            * mean_keys(seq, kind[WINDOW], kind[CHUNKED])
            * heads
            * (kind[HEAD_DIM] + kind[VALUE_DIM])
        )
        forward_s = flops / (gpu.flops * gpu.attention_fraction)
        return forward_s, 2.5 * flops / (gpu.flops * gpu.attention_backward_fraction)
    rows = seq / cp
    batch = microbatch * heads
    matmul_s = gemm_s(gpu, batch, rows, seq, kind[HEAD_DIM], 2.0) + gemm_s(gpu, batch, rows, kind[VALUE_DIM], seq, 2.0)
    pass_s = batch * rows * seq / (gpu.bytes_per_s * gpu.memory_fraction)
    return matmul_s + 9.0 * pass_s, 2.0 * matmul_s + 11.0 * pass_s


@formula
def layer_gemms_s(
    gpu: GpuNumbers, stack: StackNumbers, kind: Kinds, hidden: float, tokens: float, tp: float, ep: float, etp: float
) -> tuple[float, float, float, float]:
    """(forward, input gradient, weight gradient, GEMM kernels) of one layer's weight matrices for `tokens` per rank."""
    out = stack.gradient_bytes
    forward_s = input_s = weight_s = 0.0
    count = 0.0
    heads = max(1.0, kind[HEADS] / tp)
    if kind[KV_LORA] > 0:  # MLA: the compressions are replicated over tensor ranks, the expansions are split by head
        nope = kind[HEAD_DIM] - kind[ROPE_DIM]
        query_in = kind[Q_LORA] if kind[Q_LORA] > 0 else hidden
        shapes = (
            (hidden, kind[KV_LORA] + kind[ROPE_DIM] + kind[Q_LORA]),
            (query_in, heads * kind[HEAD_DIM]),
            (kind[KV_LORA], heads * (nope + kind[VALUE_DIM])),
            (heads * kind[VALUE_DIM], hidden),
        )
    else:
        keys = max(1.0, kind[KV_HEADS] / tp)
        shapes = (
            (hidden, heads * kind[HEAD_DIM] + keys * (kind[HEAD_DIM] + kind[VALUE_DIM])),
            (heads * kind[VALUE_DIM], hidden),
            (0.0, 0.0),
            (0.0, 0.0),
        )
    for k, n in shapes:
        if k > 0:
            forward_s += gemm_s(gpu, 1.0, tokens, n, k, 2.0)
            input_s += gemm_s(gpu, 1.0, tokens, k, n, 2.0)
            weight_s += gemm_s(gpu, 1.0, k, n, tokens, out)
            count += 1.0
    ups = 2.0 if kind[GATED] > 0 else 1.0
    dense = kind[WIDTH] if kind[EXPERTS] == 0 else kind[SHARED_WIDTH]
    if dense > 0:
        width = dense / tp
        forward_s += gemm_s(gpu, 1.0, tokens, ups * width, hidden, 2.0) + gemm_s(gpu, 1.0, tokens, hidden, width, 2.0)
        input_s += gemm_s(gpu, 1.0, tokens, hidden, ups * width, 2.0) + gemm_s(gpu, 1.0, tokens, width, hidden, 2.0)
        weight_s += gemm_s(gpu, 1.0, hidden, ups * width, tokens, out) + gemm_s(gpu, 1.0, width, hidden, tokens, out)
        count += 2.0
    if kind[EXPERTS] > 0:  # routed experts: those of this rank, each with its even share of the group's tokens
        local = max(1.0, kind[EXPERTS] / ep)
        width = kind[WIDTH] / etp
        rows = tokens * (etp / tp) * kind[TOP_K] / local
        forward_s += gemm_s(gpu, local, rows, ups * width, hidden, 2.0) + gemm_s(gpu, local, rows, hidden, width, 2.0)
        input_s += gemm_s(gpu, local, rows, hidden, ups * width, 2.0) + gemm_s(gpu, local, rows, width, hidden, 2.0)
        weight_s += gemm_s(gpu, local, hidden, ups * width, rows, out) + gemm_s(gpu, local, width, hidden, rows, out)
        count += 2.0
    return forward_s, input_s, weight_s, count


@formula
def pointwise_s(
    gpu: GpuNumbers, stack: StackNumbers, kind: Kinds, hidden: float, tokens: float, tp: float, sp: float, etp: float
) -> float:
    """Forward seconds of norms, residual additions, activation, rotary embedding and, with experts, permutation.

    One pass reads or writes a half-precision tensor once. Backward takes twice as many.
    """
    split = tp if sp > 0 else 1.0
    whole = tokens * hidden / split * 2.0 * (stack.norm_passes + stack.residual_passes)
    heads = max(1.0, kind[HEADS] / tp)
    rotary = tokens * heads * kind[HEAD_DIM] * 2.0 * 2.0
    width = kind[WIDTH] / tp if kind[EXPERTS] == 0 else kind[SHARED_WIDTH] / tp + kind[TOP_K] * kind[WIDTH] / tp
    activation = tokens * width * 2.0 * stack.activation_passes
    permute = 0.0 if kind[EXPERTS] == 0 else tokens * (etp / tp) * kind[TOP_K] * hidden * 2.0 * 4.0
    return (whole + rotary + activation + permute) / (gpu.bytes_per_s * gpu.memory_fraction)


@formula
def layer_s(
    gpu: GpuNumbers,
    stack: StackNumbers,
    kind: Kinds,
    hidden: float,
    microbatch: float,
    seq: float,
    tp: float,
    sp: float,
    cp: float,
    ep: float,
    etp: float,
) -> BlockTime:
    """One layer, one microbatch, one GPU: see `BlockTime`."""
    tokens = microbatch * seq / cp
    forward_s, input_s, weight_s, gemms = layer_gemms_s(gpu, stack, kind, hidden, tokens, tp, ep, etp)
    attention_s, attention_backward_s = attention_core_s(gpu, stack, kind, microbatch, seq, tp, cp)
    other_s = pointwise_s(gpu, stack, kind, hidden, tokens, tp, sp, etp)
    repeat_s = stack.selective_attention * attention_s
    if stack.selective_gemms > 0:
        repeat_s += stack.selective_gemms * forward_s + other_s
    return BlockTime(
        forward_s + attention_s + other_s,
        input_s + attention_backward_s + 2.0 * other_s,
        weight_s,
        attention_s,
        repeat_s,
        stack.kernels_forward + gemms,
        stack.kernels_backward + 2.0 * gemms,
    )


@formula
def head_s(gpu: GpuNumbers, stack: StackNumbers, hidden: float, vocab: float, tokens: float, tp: float) -> float:
    """Logits and cross-entropy of one microbatch, forward and backward: three GEMMs and passes over fp32 logits."""
    columns = vocab / tp
    matmul_s = gemm_s(gpu, 1.0, tokens, columns, hidden, 2.0) + gemm_s(gpu, 1.0, tokens, hidden, columns, 2.0)
    matmul_s += gemm_s(gpu, 1.0, hidden, columns, tokens, stack.gradient_bytes)
    return matmul_s + tokens * columns * 4.0 * stack.head_passes / (gpu.bytes_per_s * gpu.memory_fraction)
