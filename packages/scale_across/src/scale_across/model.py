"""Shapes of transformer language models: what a training step computes, stores and sends, before any is split.

A `ModelShape` is a tuple of layers in model order; layers may differ in kind (dense or mixture of experts, full or
windowed attention), and equal layers are the same object, so 126 of them cost nothing.

Parameters and FLOPs both come from one list, `projections(hidden, layer)`: the weight matrices of a layer, how many
copies are stored, how many a token goes through, and along which side tensor parallelism cuts them. FLOPs are exact
integers for ONE sequence; a multiply-add counts as two. Projections, attention with every query-key pair, and
attention with the causal pairs only are kept apart, because published utilisations differ in which they count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from common.config import ConfigError

Split = Literal["column", "row", "replicated"]
Recompute = Literal["none", "selective", "full"]


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
    chunked: bool = False
    """`window` cuts the sequence into chunks (Llama 4) instead of sliding along it."""
    qkv_bias: bool = False
    """Bias on query, key and value; for MLA on the two compressing projections."""
    out_bias: bool = False
    qk_norm: bool = False
    """A learned norm of width `head_dim` on queries and one on keys (Qwen 3, Gemma 3)."""
    sinks: bool = False
    """One learned attention sink per head (GPT-OSS)."""

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
    """Bias in the routed experts."""
    router_bias: bool = False
    shared_bias: bool = False
    shared_gate: bool = False
    """A learned scalar gate before the shared experts (Qwen2-MoE)."""


@dataclass(frozen=True)
class Layer:
    """One transformer block."""

    attention: Attention
    ffn: Ffn | Moe
    norms: int = 2
    """Norms of width `hidden`: 2, or 4 with one after each block as well (Gemma 2 and 3)."""
    norm_bias: bool = False
    """LayerNorm with a bias instead of RMSNorm."""


@dataclass(frozen=True)
class Projection:
    """Weight matrices of one name in a layer: each maps `inner` to `outer` features."""

    name: str
    inner: int
    outer: int
    split: Split
    """How tensor parallelism cuts it: `column` its outputs, `row` its inputs, `replicated` not at all."""
    bias: bool = False
    copies: int = 1
    """Stored copies: the number of experts, else 1."""
    uses: int = 1
    """Copies that one token goes through: the router's top k, else 1."""
    routed: bool = False
    """Belongs to the routed experts."""

    @property
    def parameters(self) -> int:
        """Weights and biases of all copies."""
        return self.copies * (self.inner * self.outer + (self.outer if self.bias else 0))

    @property
    def flops_per_token(self) -> int:
        """Of the forward pass; input gradient and weight gradient each cost the same again."""
        return 2 * self.uses * self.inner * self.outer

    def shard(self, tp: int) -> Projection:
        """The part on one of `tp` tensor-parallel ranks; a `replicated` projection is returned as it is.

        Raises:
            ConfigError: the cut side is not divisible by `tp`.
        """
        if self.split == "replicated":
            return self
        side = self.outer if self.split == "column" else self.inner
        if tp < 1 or side % tp:
            raise ConfigError(f"tp {tp}: the {side} features of {self.name!r} cannot be cut into that many equal parts")
        return replace(self, outer=side // tp) if self.split == "column" else replace(self, inner=side // tp)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by how they are divided: a rank holds tensor / TP + expert / (EP x expert TP) + replicated."""

    tensor: int = 0
    """Cut by tensor parallelism."""
    expert: int = 0
    """Routed experts: divided by expert parallelism, and cut by expert tensor parallelism."""
    replicated: int = 0
    """Whole on every rank of a tensor-parallel group: norms, routers, biases added after a reduction."""

    @property
    def total(self) -> int:
        """All of them, each once."""
        return self.tensor + self.expert + self.replicated

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(
            self.tensor + other.tensor, self.expert + other.expert, self.replicated + other.replicated
        )

    def __mul__(self, times: int) -> ParameterCounts:
        return ParameterCounts(self.tensor * times, self.expert * times, self.replicated * times)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one phase."""

    linear: int = 0
    attention: int = 0
    """Scores and weighted values over every query-key pair, masked or not."""
    causal_attention: int = 0
    """The same over the pairs that the causal mask leaves."""

    def total(self, causal: bool = False) -> int:
        """Projections plus attention; `causal` leaves out masked pairs."""
        return self.linear + (self.causal_attention if causal else self.attention)

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.linear + other.linear,
            self.attention + other.attention,
            self.causal_attention + other.causal_attention,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.linear * times, self.attention * times, self.causal_attention * times)


@dataclass(frozen=True)
class PhaseFlops:
    """FLOPs of one training step by phase. Attention has no weights: its whole backward is input gradient."""

    forward: Flops = Flops()
    input_gradient: Flops = Flops()
    weight_gradient: Flops = Flops()
    recompute: Flops = Flops()

    @property
    def model(self) -> Flops:
        """What the model needs (MFU): everything but recomputation."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def hardware(self) -> Flops:
        """What is executed (HFU): with recomputation."""
        return self.model + self.recompute

    def __add__(self, other: PhaseFlops) -> PhaseFlops:
        return PhaseFlops(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.recompute + other.recompute,
        )

    def __mul__(self, times: int) -> PhaseFlops:
        return PhaseFlops(
            self.forward * times, self.input_gradient * times, self.weight_gradient * times, self.recompute * times
        )


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
        return list(self._kinds.items())

    @cached_property
    def _kinds(self) -> Counter[Layer]:
        return Counter(self.layers)  # hashing a hundred layers takes longer than an estimate

    @cached_property
    def embedding(self) -> ParameterCounts:
        """The token table (vocabulary cut by TP) and learned positions."""
        return ParameterCounts(
            tensor=self.vocab * self.hidden, replicated=self.seq_len * self.hidden if self.learned_positions else 0
        )

    @cached_property
    def head(self) -> ParameterCounts:
        """The final norm, and the output projection unless it is the token table."""
        norm = self.hidden * (2 if self.layers[-1].norm_bias else 1)
        return ParameterCounts(tensor=0 if self.tied_embeddings else self.vocab * self.hidden, replicated=norm)

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied table counts once."""
        layers = sum(layer_parameters(self.hidden, layer).total * n for layer, n in self.kinds())
        return self.embedding.total + layers + self.head.total

    @cached_property
    def active_parameters(self) -> int:
        """Parameters without the routed experts that a token does not go through; embedding tables included."""
        idle = 0
        for layer, n in self.kinds():
            if isinstance(layer.ffn, Moe):
                expert = layer_parameters(self.hidden, layer).expert
                idle += n * expert * (layer.ffn.experts - layer.ffn.top_k) // layer.ffn.experts
        return self.parameters - idle

    def stage_parameters(self, start: int, stop: int) -> ParameterCounts:
        """Of layers `start` up to `stop`, with the embedding before the first and the head after the last layer.

        When the model is tied and the stage has the last layer but not the first, it holds its own copy of the table.
        """
        counts = ParameterCounts()
        for layer, n in Counter(self.layers[start:stop]).items():
            counts += layer_parameters(self.hidden, layer) * n
        first, last = start == 0, stop == len(self.layers)
        if first:
            counts += self.embedding
        if last:
            counts += self.head
        if last and not first and self.tied_embeddings:
            counts += ParameterCounts(tensor=self.vocab * self.hidden)
        return counts

    def head_flops(self, seq_len: int) -> PhaseFlops:
        """Logits of one sequence of `seq_len` tokens. They are not recomputed."""
        logits = Flops(linear=2 * seq_len * self.hidden * self.vocab)
        return PhaseFlops(logits, logits, logits)

    def flops(self, seq_len: int, recompute: Recompute = "none") -> PhaseFlops:
        """One training step on one sequence of `seq_len` tokens: all layers and the logits."""
        total = self.head_flops(seq_len)
        for layer, n in self.kinds():
            total += layer_flops(self.hidden, layer, seq_len, recompute) * n
        return total


def projections(hidden: int, layer: Layer) -> tuple[Projection, ...]:
    """The weight matrices of a layer in the order in which a token meets them."""
    return (*_attention_projections(hidden, layer.attention), *_ffn_projections(hidden, layer.ffn))


def _attention_projections(hidden: int, a: Attention) -> tuple[Projection, ...]:
    out = Projection("out", a.heads * a.value_dim, hidden, "row", a.out_bias)
    if not a.kv_lora_rank:
        keys, values = a.kv_heads * a.head_dim, a.kv_heads * a.value_dim
        return (
            Projection("query", hidden, a.heads * a.head_dim, "column", a.qkv_bias),
            Projection("key", hidden, keys, "column", a.qkv_bias),
            Projection("value", hidden, values, "column", a.qkv_bias),
            out,
        )
    # DeepSeek-V2, arXiv 2405.04434, section 2.1: queries and key-values pass through narrow latents.
    expanded = a.heads * (a.head_dim - a.rope_head_dim + a.value_dim)
    key_value = (
        Projection("kv_down", hidden, a.kv_lora_rank + a.rope_head_dim, "replicated", a.qkv_bias),
        Projection("kv_up", a.kv_lora_rank, expanded, "column"),
    )
    if not a.q_lora_rank:
        return (Projection("query", hidden, a.heads * a.head_dim, "column"), *key_value, out)
    return (
        Projection("q_down", hidden, a.q_lora_rank, "replicated", a.qkv_bias),
        Projection("q_up", a.q_lora_rank, a.heads * a.head_dim, "column"),
        *key_value,
        out,
    )


def _ffn_projections(hidden: int, ffn: Ffn | Moe) -> tuple[Projection, ...]:
    def block(
        prefix: str, width: int, bias: bool, copies: int = 1, uses: int = 1, routed: bool = False
    ) -> tuple[Projection, ...]:
        sides = ("gate", "up") if ffn.gated else ("up",)
        ins = (Projection(prefix + side, hidden, width, "column", bias, copies, uses, routed) for side in sides)
        return (*ins, Projection(prefix + "down", width, hidden, "row", bias, copies, uses, routed))

    if isinstance(ffn, Ffn):
        return block("", ffn.width, ffn.bias)
    parts = [Projection("router", hidden, ffn.experts, "replicated", ffn.router_bias)]
    parts += block("expert_", ffn.width, ffn.bias, ffn.experts, ffn.top_k, routed=True)
    if ffn.shared_gate:
        parts.append(Projection("shared_gate", hidden, 1, "replicated"))
    if ffn.shared_width or ffn.shared_bias:
        parts += block("shared_", ffn.shared_width, ffn.shared_bias)
    return tuple(parts)


def layer_parameters(hidden: int, layer: Layer) -> ParameterCounts:
    """All parameters of one layer, by how they are divided over ranks."""
    tensor = expert = replicated = 0
    for p in projections(hidden, layer):
        late_bias = p.copies * p.outer if p.bias and p.split == "row" else 0
        if p.routed:
            expert += p.parameters
        elif p.split == "replicated":
            replicated += p.parameters
        else:
            tensor += p.parameters - late_bias
            replicated += late_bias
    a = layer.attention
    tensor += a.heads if a.sinks else 0
    replicated += 2 * a.head_dim if a.qk_norm else 0
    replicated += a.q_lora_rank + a.kv_lora_rank  # the norm of each latent
    replicated += layer.norms * hidden * (2 if layer.norm_bias else 1)
    return ParameterCounts(tensor, expert, replicated)


def attention_pairs(attention: Attention, seq_len: int) -> tuple[int, int]:
    """Query-key pairs of one sequence: all that a kernel without a mask visits, and those the causal mask leaves.

    With a window w < s the first is the whole band, s x w. Causal: s(s+1)/2; sliding: w(w+1)/2 + (s-w)w; chunks:
    a triangle for each chunk.
    """
    s, w = seq_len, attention.window
    if not 0 < w < s:
        return s * s, s * (s + 1) // 2
    if attention.chunked:
        chunks, rest = divmod(s, w)
        return s * w, chunks * (w * (w + 1) // 2) + rest * (rest + 1) // 2
    return s * w, w * (w + 1) // 2 + (s - w) * w


def layer_flops(hidden: int, layer: Layer, seq_len: int, recompute: Recompute = "none") -> PhaseFlops:
    """FLOPs of one layer on one sequence.

    Attention takes 2 x heads x (head_dim + value_dim) FLOPs per query-key pair forward and twice that backward;
    what a flash-attention kernel repeats inside its backward is the kernel's affair and not counted here. Recompute
    `selective` repeats attention (Korthikanti et al., arXiv 2205.05198), `full` the layer's whole forward.
    """
    if recompute not in get_args(Recompute):
        raise ConfigError(f"recompute {recompute!r}: choose one of {', '.join(get_args(Recompute))}")
    a = layer.attention
    pairs, causal_pairs = attention_pairs(a, seq_len)
    per_pair = 2 * a.heads * (a.head_dim + a.value_dim)
    core = Flops(attention=per_pair * pairs, causal_attention=per_pair * causal_pairs)
    linear = Flops(linear=seq_len * sum(p.flops_per_token for p in projections(hidden, layer)))
    again = {"none": Flops(), "selective": core, "full": linear + core}[recompute]
    return PhaseFlops(linear + core, linear + core * 2, linear, again)


def gpt(
    layers: int, hidden: int, heads: int, vocab: int = 51200, seq_len: int = 2048, ffn: int = 0, name: str = ""
) -> ModelShape:
    """A GPT as Megatron-LM trains it: learned positions, tied embeddings, biases, LayerNorm, GELU of width 4 x hidden.

    Parameters (Narayanan et al., SC21, eq. 2, plus the final norm): 12 l h^2 + 13 l h + (V + s) h + 2 h.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq_len": seq_len}
    check_positive(sizes.items())
    if hidden % heads:
        raise ConfigError(f"heads {heads}: must divide hidden {hidden}")
    attention = Attention(heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    layer = Layer(attention, Ffn(ffn or 4 * hidden, gated=False, bias=True), norm_bias=True)
    label = name or f"gpt-{layers}x{hidden}"
    return ModelShape(label, hidden, vocab, seq_len, (layer,) * layers, tied_embeddings=True, learned_positions=True)


def check_positive(sizes: Iterable[tuple[str, int]]) -> None:
    """Raise ConfigError for the first size that is not a whole number above 0."""
    for key, value in sizes:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} {value!r}: must be a whole number above 0")
