"""One function per family of Hugging Face models: the checked keys of a `config.json` to a `ModelShape`.

Defaults of missing keys, and which matrices have biases, follow the configuration and modelling code of transformers
5. The keys that set a model's size must be there; the rest may be missing, as they are in files on the Hub.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common.config import ConfigError
from scale_across.model import Attention, Ffn, Layer, ModelShape, Moe

MAX_LAYERS = 10_000
MAX_SIZE = 2**31
"""No width, vocabulary or sequence is larger; a larger number is a slip."""

REQUIRED = object()


class Keys:
    """The keys of one configuration, read with checks. Errors name key, value and what is valid."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fault(self, key: str, message: str) -> ConfigError:
        """An error about `key`."""
        return ConfigError(f"{self.where}: {key}: {message}")

    def find(self, *names: str) -> tuple[str, Any]:
        """First given key among synonyms and its value; the first name and None when all are missing or null.

        Raises:
            ConfigError: two synonyms with different values.
        """
        given = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        if len({repr(value) for _, value in given}) > 1:
            raise self.fault(given[0][0], f"{given[0][1]!r} contradicts {given[1][0]} {given[1][1]!r}; keep one")
        return given[0] if given else (names[0], None)

    def size(self, *names: str, default: Any = REQUIRED, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number of `least` to `most` under one of the synonyms `names`; null counts as missing."""
        key, value = self.find(*names)
        if value is None:
            if default is REQUIRED:
                near = difflib.get_close_matches(key, sorted(self.data), n=1, cutoff=0.75)
                hint = f"; did you mean it by {near[0]!r}?" if near else ""
                raise self.fault(key, f"required, but missing{hint}")
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fault(key, f"must be a whole number from {least} to {most} (found {value!r})")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false under `key`."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false (found {value!r})")
        return value

    def indices(self, key: str) -> list[int] | None:
        """A list of layer indices, or None when missing."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self.fault(key, f"must be a list of layer indices (found {str(value)[:60]!r})")
        return value

    def must_be(self, key: str, expected: Any, why: str) -> None:
        """Refuse a feature that this reader does not know."""
        if self.data.get(key) not in (None, expected):
            raise self.fault(key, f"must be {expected!r}: {why} (found {str(self.data[key])[:60]!r})")


Reader = Callable[[Keys], ModelShape]


def _grouped(k: Keys, kv_heads: int = 0) -> tuple[int, int]:
    """Heads and key-value heads. Null key-value heads mean one for each head, missing ones `kv_heads` (0: the same)."""
    heads = k.size("num_attention_heads", "n_head")
    kv = k.size("num_key_value_heads", default=heads if "num_key_value_heads" in k.data else kv_heads or heads)
    if heads % kv:
        source = "" if "num_key_value_heads" in k.data else " (missing; this family's default)"
        raise k.fault("num_attention_heads", f"{heads} is not divisible by num_key_value_heads {kv}{source}")
    return heads, kv


def _heads(k: Keys, hidden: int, head_dim: int = 0, kv_heads: int = 0) -> tuple[int, int, int]:
    """Heads, key-value heads and head width; the arguments are the family's defaults (0: derived)."""
    heads, kv = _grouped(k, kv_heads)
    if k.find("head_dim")[1] is None and not head_dim and hidden % heads:
        raise k.fault("num_attention_heads", f"{heads} must divide hidden_size {hidden}, or head_dim must be given")
    return heads, kv, k.size("head_dim", default=head_dim or hidden // heads)


def _depth(k: Keys) -> int:
    return k.size("num_hidden_layers", "n_layer", most=MAX_LAYERS)


def _windows(k: Keys, depth: int, window: int, is_windowed: Callable[[int], bool]) -> list[int]:
    """Window of each layer, 0 for full attention: from `layer_types`, else by the family's rule."""
    kinds = k.data.get("layer_types")
    if kinds is None:
        return [window if is_windowed(i) else 0 for i in range(depth)]
    known = ("full_attention", "attention", "sliding_attention", "chunked_attention")
    if not isinstance(kinds, list) or len(kinds) != depth:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise k.fault("layer_types", f"must be a list of num_hidden_layers {depth} entries (found {found})")
    for kind in kinds:
        if kind not in known:
            raise k.fault("layer_types", f"{kind!r} is none of {', '.join(known)}")
    return [window if kind in known[2:] else 0 for kind in kinds]


def _model(k: Keys, hidden: int, layers: list[Layer], *, tied: bool, vocab: Any = REQUIRED, seq: int) -> ModelShape:
    equal: dict[Layer, Layer] = {}
    return ModelShape(
        name=str(k.data.get("_name_or_path") or k.data.get("model_type") or "model"),
        hidden=hidden,
        vocab=k.size("vocab_size", default=vocab),
        seq_len=k.size("max_position_embeddings", "n_positions", default=seq),
        layers=tuple(equal.setdefault(layer, layer) for layer in layers),
        tied_embeddings=k.flag("tie_word_embeddings", tied),
    )


def _llama(k: Keys) -> ModelShape:
    hidden = k.size("hidden_size")
    bias = k.flag("attention_bias", False)
    attention = Attention(*_heads(k, hidden), qkv_bias=bias, out_bias=bias)
    layer = Layer(attention, Ffn(k.size("intermediate_size"), bias=k.flag("mlp_bias", False)))
    return _model(k, hidden, [layer] * _depth(k), tied=False, seq=2048)


def _mistral(k: Keys) -> ModelShape:
    hidden, depth = k.size("hidden_size"), _depth(k)
    window = 0 if k.data.get("sliding_window", 4096) is None else k.size("sliding_window", default=4096)
    attention = Attention(*_heads(k, hidden, kv_heads=8), window=window)
    return _model(k, hidden, [Layer(attention, Ffn(k.size("intermediate_size")))] * depth, tied=False, seq=131072)


def _mixtral(k: Keys) -> ModelShape:
    hidden = k.size("hidden_size")
    attention = Attention(*_heads(k, hidden, kv_heads=8), window=k.size("sliding_window", default=0))
    moe = _experts(k, k.size("intermediate_size"))
    return _model(k, hidden, [Layer(attention, moe)] * _depth(k), tied=False, seq=131072)


def _experts(k: Keys, width: int, **more: Any) -> Moe:
    experts = k.size("num_local_experts", "num_experts", "n_routed_experts")
    top_k = k.size("num_experts_per_tok", most=experts)
    return Moe(experts, top_k, width, **more)


def _qwen(k: Keys, attention: Attention, default_window: int, windowed: Callable[[int], bool]) -> list[Attention]:
    """The attention of each layer of a Qwen model."""
    window = k.size("sliding_window", default=default_window) if k.flag("use_sliding_window", False) else 0
    windows = _windows(k, _depth(k), window, windowed)
    return [_with_window(attention, w) for w in windows]


def _with_window(attention: Attention, window: int, chunked: bool = False) -> Attention:
    return replace(attention, window=window, chunked=chunked and window > 0)


def _qwen2(k: Keys) -> ModelShape:
    hidden = k.size("hidden_size")
    attention = Attention(*_heads(k, hidden, kv_heads=32), qkv_bias=True)
    return _qwen_dense(k, hidden, attention)


def _qwen3(k: Keys) -> ModelShape:
    hidden, bias = k.size("hidden_size"), k.flag("attention_bias", False)
    heads = _heads(k, hidden, head_dim=128, kv_heads=32)
    return _qwen_dense(k, hidden, Attention(*heads, qkv_bias=bias, out_bias=bias, qk_norm=True))


def _qwen_dense(k: Keys, hidden: int, attention: Attention) -> ModelShape:
    first = k.size("max_window_layers", default=28, least=0)
    ffn = Ffn(k.size("intermediate_size"))
    layers = [Layer(a, ffn) for a in _qwen(k, attention, 4096, lambda i: i >= first)]
    return _model(k, hidden, layers, tied=False, seq=32768)


def _sparse_layers(k: Keys, depth: int) -> list[bool]:
    """Which layers of a Qwen MoE are mixtures."""
    dense, step = k.indices("mlp_only_layers") or [], k.size("decoder_sparse_step", default=1)
    experts = k.size("num_experts", "num_local_experts", least=0)
    return [experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(depth)]


def _qwen_moe(k: Keys, hidden: int, attentions: list[Attention], **more: Any) -> ModelShape:
    sparse = _sparse_layers(k, len(attentions))
    moe = _experts(k, k.size("moe_intermediate_size"), **more) if any(sparse) else None
    dense = Ffn(k.size("intermediate_size")) if not all(sparse) else None
    layers = [Layer(a, moe if s else dense) for a, s in zip(attentions, sparse, strict=True)]  # type: ignore[arg-type]
    return _model(k, hidden, layers, tied=False, seq=32768)


def _qwen2_moe(k: Keys) -> ModelShape:
    hidden = k.size("hidden_size")
    attention = Attention(*_heads(k, hidden, kv_heads=16), qkv_bias=k.flag("qkv_bias", True))
    last = k.size("max_window_layers", default=28, least=0)
    attentions = _qwen(k, attention, 4096, lambda i: i % 2 == 0 and i < last)
    shared = k.size("shared_expert_intermediate_size", default=5632, least=0)
    return _qwen_moe(k, hidden, attentions, shared_width=shared, shared_gate=True)


def _qwen3_moe(k: Keys) -> ModelShape:
    hidden, bias = k.size("hidden_size"), k.flag("attention_bias", False)
    attention = Attention(*_heads(k, hidden, kv_heads=4), qkv_bias=bias, out_bias=bias, qk_norm=True)
    return _qwen_moe(k, hidden, _qwen(k, attention, 4096, lambda i: True))


def _deepseek(k: Keys) -> ModelShape:
    """DeepSeek-V2 and V3 (and Kimi K2); the multi-token prediction module is not part of the shape."""
    hidden, depth = k.size("hidden_size"), _depth(k)
    version2 = k.data.get("model_type") == "deepseek_v2"
    heads, _ = _grouped(k)
    rope, bias = k.size("qk_rope_head_dim", default=64), k.flag("attention_bias", False)
    q_rank = 0 if k.data.get("q_lora_rank", 1536) is None else k.size("q_lora_rank", default=1536)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=k.size("qk_nope_head_dim", default=128) + rope,
        v_head_dim=k.size("v_head_dim", default=128),
        q_lora_rank=q_rank,
        kv_lora_rank=k.size("kv_lora_rank", default=512),
        rope_head_dim=rope,
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp_bias = version2 and k.flag("mlp_bias", False)
    dense_first = k.size("first_k_dense_replace", default=0 if version2 else 3, least=0)
    dense = Layer(attention, Ffn(k.size("intermediate_size"), bias=mlp_bias))
    layers = [dense] * min(dense_first, depth)
    if depth > dense_first:
        width = k.size("moe_intermediate_size")
        shared = k.size("n_shared_experts", default=2 if version2 else 1, least=0)
        moe = _experts(k, width, shared_width=shared * width, shared_bias=mlp_bias)
        layers += [Layer(attention, moe)] * (depth - dense_first)
    return _model(k, hidden, layers, tied=False, seq=2048 if version2 else 4096)


def _llama4(k: Keys) -> ModelShape:
    hidden, depth, bias = k.size("hidden_size"), _depth(k), k.flag("attention_bias", False)
    heads = _heads(k, hidden, head_dim=128, kv_heads=8)
    attention = Attention(*heads, qkv_bias=bias, out_bias=bias)
    rope = k.indices("no_rope_layers") or []
    if rope and len(rope) < depth:
        raise k.fault("no_rope_layers", f"must have num_hidden_layers {depth} entries (found {len(rope)})")
    interval = k.size("no_rope_layer_interval", default=4)
    missing = k.data.get("attention_chunk_size", 8192) is None
    chunk = 0 if missing else k.size("attention_chunk_size", default=8192)
    windows = _windows(k, depth, chunk, lambda i: bool(rope[i]) if rope else (i + 1) % interval != 0)
    step = k.size("interleave_moe_layer_step", default=1)
    sparse = k.indices("moe_layers")
    sparse = list(range(step - 1, depth, step)) if sparse is None else sparse
    width = k.size("intermediate_size")
    moe = _experts(k, width, shared_width=width) if sparse else None
    dense = Ffn(k.size("intermediate_size_mlp")) if len(set(sparse)) < depth else None
    layers = [
        Layer(_with_window(attention, w, chunked=True), moe if i in sparse else dense)  # type: ignore[arg-type]
        for i, w in enumerate(windows)
    ]
    return _model(k, hidden, layers, tied=False, seq=131072)


def _gpt_oss(k: Keys) -> ModelShape:
    hidden, depth, bias = k.size("hidden_size"), _depth(k), k.flag("attention_bias", True)
    heads = _heads(k, hidden, head_dim=0 if "head_dim" in k.data else 64, kv_heads=8)
    attention = Attention(*heads, qkv_bias=bias, out_bias=bias, sinks=True)
    window = 0 if k.data.get("sliding_window", 128) is None else k.size("sliding_window", default=128)
    moe = _experts(k, k.size("intermediate_size"), bias=True, router_bias=True)
    windows = _windows(k, depth, window, lambda i: i % 2 == 0)
    return _model(k, hidden, [Layer(_with_window(attention, w), moe) for w in windows], tied=False, seq=131072)


def _gpt2(k: Keys) -> ModelShape:
    k.must_be("add_cross_attention", False, "only decoder-only models are known")
    hidden = k.size("n_embd", "hidden_size")
    heads = k.size("n_head", "num_attention_heads")
    if hidden % heads:
        raise k.fault("n_head", f"{heads} must divide n_embd {hidden}")
    attention = Attention(heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    ffn = Ffn(k.size("n_inner", default=4 * hidden), gated=False, bias=True)
    layers = [Layer(attention, ffn, norm_bias=True)] * _depth(k)
    return replace(_model(k, hidden, layers, tied=True, seq=1024), learned_positions=True)


def _gpt_neox(k: Keys) -> ModelShape:
    hidden, bias = k.size("hidden_size"), k.flag("attention_bias", True)
    heads = k.size("num_attention_heads")
    if hidden % heads:
        raise k.fault("num_attention_heads", f"{heads} must divide hidden_size {hidden}")
    attention = Attention(heads, heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    ffn = Ffn(k.size("intermediate_size"), gated=False, bias=True)
    return _model(k, hidden, [Layer(attention, ffn, norm_bias=True)] * _depth(k), tied=False, seq=2048)


def _nemotron(k: Keys) -> ModelShape:
    hidden, bias = k.size("hidden_size"), k.flag("attention_bias", False)
    attention = Attention(*_heads(k, hidden), qkv_bias=bias, out_bias=bias)
    ffn = Ffn(k.size("intermediate_size"), gated=False, bias=k.flag("mlp_bias", False))
    return _model(k, hidden, [Layer(attention, ffn, norm_bias=True)] * _depth(k), tied=False, seq=4096)


def _gemma(k: Keys) -> ModelShape:
    """Gemma 1, 2 and 3 (text). Files of Gemma 3 on the Hub leave out what equals the defaults."""
    kind = k.data["model_type"]
    hidden, depth, bias = k.size("hidden_size"), _depth(k), k.flag("attention_bias", False)
    third = kind == "gemma3_text"
    if third:
        k = Keys({"num_attention_heads": 8, **k.data}, k.where)
    heads = _heads(k, hidden, head_dim=256, kv_heads=16 if kind == "gemma" else 4)
    attention = Attention(*heads, qkv_bias=bias, out_bias=bias, qk_norm=third)
    ffn = Ffn(k.size("intermediate_size"))
    if kind == "gemma":
        return _model(k, hidden, [Layer(attention, ffn)] * depth, tied=True, seq=8192)
    window = 0 if k.data.get("sliding_window", 4096) is None else k.size("sliding_window", default=4096)
    period = k.size("sliding_window_pattern", "_sliding_window_pattern", default=6) if third else 2
    windows = _windows(k, depth, window, lambda i: (i + 1) % period != 0)
    layers = [Layer(_with_window(attention, w), ffn, norms=4) for w in windows]
    return _model(k, hidden, layers, tied=True, vocab=262208 if third else REQUIRED, seq=131072 if third else 8192)


FAMILIES: dict[str, Reader] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "nemotron": _nemotron,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}
