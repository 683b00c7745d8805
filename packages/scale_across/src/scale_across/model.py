"""Shapes of transformer language models: what a training step computes, stores and sends, before any is split.

A `ModelShape` is a tuple of layers in model order; layers may differ in kind (dense or mixture of experts, full or
windowed attention), and equal layers are the same object, so 126 of them cost nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Self-attention with grouped key-value heads, or multi-head latent attention (MLA) when `kv_lora_rank` > 0."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of one query or key head. For MLA: nope part + rope part."""
    v_head_dim: int = 0
    """Width of one value head; 0 means `head_dim`."""
    q_lora_rank: int = 0
    """MLA: width of the compressed query; 0 means an uncompressed projection."""
    kv_lora_rank: int = 0
    """MLA: width of the compressed key-value; 0 means plain attention."""
    rope_head_dim: int = 0
    """MLA: width of the rotary part of a key, shared by all heads."""
    window: int = 0
    """Sliding window or chunk in tokens; 0 means full attention."""
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True)
class Ffn:
    """A dense feed-forward block: up (and gate) projection, activation, down projection."""

    width: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: every token goes to `top_k` of `experts`, and through the shared experts."""

    experts: int
    top_k: int
    width: int
    """Inner width of one routed expert."""
    shared_width: int = 0
    """Summed inner width of the experts that every token takes."""
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """One transformer block."""

    attention: Attention
    ffn: Ffn | Moe


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only language model."""

    name: str
    hidden: int
    vocab: int
    seq_len: int
    """Longest sequence of the configuration; a job may train on shorter ones."""
    layers: tuple[Layer, ...]
    tied_embeddings: bool = False
    learned_positions: bool = False

    def kinds(self) -> list[tuple[Layer, int]]:
        """Distinct layers with their count, in order of first appearance."""
        return list(Counter(self.layers).items())
