"""Parameters and FLOPs of model shapes against published and hand-worked values, and that splitting conserves them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from scale_across.model import (
    Attention,
    Ffn,
    Flops,
    Layer,
    ModelShape,
    Moe,
    attention_pairs,
    gpt,
    layer_flops,
    layer_parameters,
    projections,
)

few = settings(max_examples=30, deadline=None)

attentions = st.builds(
    lambda kv, group, dim, bias, norm, window: Attention(
        kv * group, kv, dim, window=window, qkv_bias=bias, out_bias=bias, qk_norm=norm, sinks=norm
    ),
    *(st.sampled_from(values) for values in ([2, 4], [1, 3], [4, 6], [True, False], [True, False], [0, 5])),
) | st.builds(
    lambda heads, q: Attention(heads, heads, 10, v_head_dim=8, q_lora_rank=q, kv_lora_rank=7, rope_head_dim=4),
    st.sampled_from([2, 4]),
    st.sampled_from([0, 9]),
)
blocks = st.builds(Ffn, st.sampled_from([8, 20]), st.booleans(), st.booleans()) | st.builds(
    lambda experts, k, shared, bias: Moe(experts, k, 12, shared, bias=bias, shared_gate=bias, router_bias=bias),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 16]),
    st.booleans(),
)
layers = st.builds(Layer, attentions, blocks, st.sampled_from([2, 4]), st.booleans())
models = st.builds(
    lambda kinds, order, tied: ModelShape("m", 16, 40, 32, tuple(kinds[i % len(kinds)] for i in order), tied),
    st.lists(layers, min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "published_billion"),
    [(24, 2304, 24, 1.7), (36, 4096, 32, 7.5), (96, 12288, 96, 174.6), (128, 25600, 160, 1008.0)],
)
def test_gpt_parameters_follow_sc21_equation_2(layers: int, hidden: int, heads: int, published_billion: float) -> None:
    """Narayanan et al. leave out the final norm's 2 h."""
    shape = gpt(layers, hidden, heads, vocab=51200, seq_len=2048)
    assert shape.parameters == 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 2048) * hidden + 2 * hidden
    assert shape.parameters / 1e9 == pytest.approx(published_billion, rel=0.03)


def test_gpt_flops_follow_sc21_equation_3() -> None:
    """F = 96 B s l h^2 (1 + s/6h + V/16lh): three passes and one recomputation, masked pairs counted."""
    layers, h, s, vocab = 40, 6144, 2048, 51200
    step = gpt(layers, h, 48, vocab, s).flops(s, recompute="full")
    assert step.hardware.total() == 96 * s * layers * h**2 + 16 * s * s * layers * h + 6 * s * vocab * h
    assert step.hardware.total() == pytest.approx(96 * s * layers * h**2 * (1 + s / 6 / h + vocab / 16 / layers / h))
    assert step.model.total() == 72 * s * layers * h**2 + 12 * s * s * layers * h + 6 * s * vocab * h


def test_selective_recompute_repeats_attention_only() -> None:
    """Korthikanti et al., appendix A: 4 B s^2 h more per layer."""
    layer = gpt(1, 64, 4, 128, 32).layers[0]
    step = layer_flops(64, layer, 32, "selective")
    assert step.recompute == Flops(0, 4 * 32 * 32 * 64, 4 * 64 * 32 * 33 // 2)
    assert step.weight_gradient.attention == 0
    assert step.input_gradient.attention == 2 * step.forward.attention


def test_mixture_counts_the_experts_a_token_takes() -> None:
    attention = Attention(2, 2, 4)
    dense, sparse = Layer(attention, Ffn(10)), Layer(attention, Moe(8, 2, 10))
    shape = ModelShape("m", 8, 16, 4, (dense, sparse))
    expert = 3 * 8 * 10
    assert shape.parameters - shape.active_parameters == 6 * expert
    forward = [layer_flops(8, layer, 4).forward.linear for layer in shape.layers]
    assert forward[1] - forward[0] == 4 * 2 * (2 * expert - expert + 8 * 8)  # one more expert, and the router


@pytest.mark.parametrize(
    ("attention", "full", "causal"),
    [
        (Attention(1, 1, 1), 49, 28),
        (Attention(1, 1, 1, window=3), 21, 1 + 2 + 3 * 5),
        (Attention(1, 1, 1, window=3, chunked=True), 21, 6 + 6 + 1),
        (Attention(1, 1, 1, window=7), 49, 28),
    ],
)
def test_pairs_by_enumeration(attention: Attention, full: int, causal: int) -> None:
    assert attention_pairs(attention, 7) == (full, causal)
    w = attention.window or 7
    seen = [(q, k) for q in range(7) for k in range(q + 1) if (q // w == k // w if attention.chunked else q - k < w)]
    assert causal == len(seen)


@few
@given(models, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_tensor_and_expert_shards_sum_to_the_layer(model: ModelShape, tp: int, ep: int) -> None:
    for layer, _ in model.kinds():
        parts = projections(model.hidden, layer)
        for whole in parts:
            shard = whole.shard(tp)
            cuts = 1 if whole.split == "replicated" else tp
            on_rank = (whole.copies // ep if whole.routed else whole.copies) * shard.inner * shard.outer
            ranks = cuts * ep if whole.routed else cuts
            assert on_rank * ranks == whole.copies * whole.inner * whole.outer
            assert shard.flops_per_token * cuts == whole.flops_per_token
        counts, a = layer_parameters(model.hidden, layer), layer.attention
        beside = layer.norms * model.hidden * (1 + layer.norm_bias) + a.q_lora_rank + a.kv_lora_rank
        beside += (2 * a.head_dim if a.qk_norm else 0) + (a.heads if a.sinks else 0)
        assert counts.total == sum(p.parameters for p in parts) + beside
        assert counts.tensor % tp == 0
        assert counts.expert % ep == 0


@few
@given(models, st.lists(st.integers(0, 9), max_size=3))
def test_pipeline_stages_sum_to_the_model(model: ModelShape, cuts: list[int]) -> None:
    n = len(model.layers)
    edges = sorted({0, n, *(cut for cut in cuts if cut < n)})
    stages = [model.stage_parameters(a, b) for a, b in itertools.pairwise(edges)]
    copied_table = model.vocab * model.hidden if model.tied_embeddings and len(stages) > 1 else 0
    assert sum(stage.total for stage in stages) == model.parameters + copied_table
    per_layer = sum((layer_flops(model.hidden, layer, 20, "full") for layer in model.layers), model.head_flops(20))
    assert per_layer == model.flops(20, "full")


@few
@given(models, st.integers(1, 40))
def test_phases_relate(model: ModelShape, seq_len: int) -> None:
    step = model.flops(seq_len)
    assert step.weight_gradient.linear == step.input_gradient.linear == step.forward.linear
    assert 0 < step.forward.causal_attention <= step.forward.attention
    assert step.recompute == Flops()
    assert model.active_parameters <= model.parameters


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads 3: must divide hidden 64"):
        gpt(2, 64, 3)
    with pytest.raises(ConfigError, match="layers 0: must be a whole number above 0"):
        gpt(0, 64, 4)
    with pytest.raises(ConfigError, match="tp 3: the 64 features of 'query'"):
        projections(64, gpt(1, 64, 4).layers[0])[0].shard(3)
    with pytest.raises(ConfigError, match="recompute 'sometimes': choose one of none, selective, full"):
        gpt(1, 64, 4).flops(8, "sometimes")  # type: ignore[arg-type]
