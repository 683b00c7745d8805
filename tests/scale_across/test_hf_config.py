"""Parameter counts equal transformers' own for every family; unusable configurations give one clear error."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from common.config import ConfigError
from scale_across.hf_config import NESTED, from_hf_config
from scale_across.hf_families import FAMILIES
from scale_across.model import ModelShape, Moe
from scale_across.model_presets import load_model

MODELS = Path(str(files("scale_across"))) / "data" / "models"
ODD = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 331,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 33}
MLA = {
    **{**ODD, **EXPERTS, "num_hidden_layers": 4, "n_routed_experts": 5, "n_shared_experts": 2, "v_head_dim": 9},
    **{"first_k_dense_replace": 2, "kv_lora_rank": 31, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "n_group": 1},
}
LLAMA4 = {**ODD, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 131}
GQA = {"num_key_value_heads": 2}


def wide(hidden: int, inner: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Published widths, two layers unless `more` says otherwise."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        **more,
    }


CASES: dict[str, dict[str, Any]] = {
    "llama, defaults": {"model_type": "llama", **ODD},
    "llama, biases": {"model_type": "llama", **ODD, **GQA, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "llama 3.1 70B": {"model_type": "llama", **wide(8192, 28672, 64, 8, 128256)},
    "mistral": {"model_type": "mistral", **ODD, **GQA},
    "mistral nemo": {"model_type": "mistral", **wide(5120, 14336, 32, 8, 131072, head_dim=128)},
    "mixtral": {"model_type": "mixtral", **ODD, **GQA, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **ODD, **GQA, "tie_word_embeddings": True},
    "qwen2, kv heads null": {"model_type": "qwen2", **ODD, "num_key_value_heads": None},
    "qwen3, head_dim missing": {"model_type": "qwen3", **ODD, **GQA},
    "qwen3, bias": {"model_type": "qwen3", **ODD, **GQA, "head_dim": 10, "attention_bias": True},
    "qwen2 moe, shared default": {
        **{"model_type": "qwen2_moe", **ODD, **GQA, **EXPERTS, "num_experts": 4},
        **{"mlp_only_layers": [1], "qkv_bias": False},
    },
    "qwen2 moe": {
        **{"model_type": "qwen2_moe", **ODD, **GQA, **EXPERTS, "num_experts": 4},
        **{"shared_expert_intermediate_size": 51},
    },
    "qwen3 moe, every second": {
        **{"model_type": "qwen3_moe", **ODD, **GQA, **EXPERTS, "num_experts": 4},
        **{"decoder_sparse_step": 2, "head_dim": 14},
    },
    "qwen3 moe, all dense": {"model_type": "qwen3_moe", **ODD, **GQA, "num_experts": 0},
    "deepseek v2": {"model_type": "deepseek_v2", **MLA, "q_lora_rank": 40, "mlp_bias": True, "attention_bias": True},
    "deepseek v2 lite": {"model_type": "deepseek_v2", **MLA, "q_lora_rank": None},
    "deepseek v3": {"model_type": "deepseek_v3", **MLA, "q_lora_rank": 40, "attention_bias": True, "topk_group": 1},
    "deepseek v3, widths by default": {
        **{"model_type": "deepseek_v3", **ODD, **EXPERTS, "n_routed_experts": 4, "num_hidden_layers": 4},
    },
    "llama 4 text, interleaved": {"model_type": "llama4_text", **LLAMA4, **GQA, "interleave_moe_layer_step": 2},
    "llama 4 nested": {
        "model_type": "llama4",
        "text_config": {**LLAMA4, **GQA, "moe_layers": [0, 2], "attention_bias": True, "head_dim": 12},
    },
    "gpt-oss, head_dim missing": {
        "model_type": "gpt_oss",
        **ODD,
        **GQA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt-oss, no bias": {
        **{"model_type": "gpt_oss", **ODD, **GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"attention_bias": False, "head_dim": 16},
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 331, "n_positions": 51},
    "gpt2, common names": {"model_type": "gpt2", **ODD, "n_inner": 50, "tie_word_embeddings": False},
    "gpt neox": {"model_type": "gpt_neox", **ODD},
    "gpt neox, tied": {"model_type": "gpt_neox", **ODD, "attention_bias": False, "tie_word_embeddings": True},
    "nemotron": {"model_type": "nemotron", **ODD, **GQA, "head_dim": 24, "mlp_bias": True, "attention_bias": True},
    "gemma": {"model_type": "gemma", **ODD, **GQA},
    "gemma 2": {"model_type": "gemma2", **ODD, **GQA, "head_dim": 18, "attention_bias": True},
    "gemma 3 text": {"model_type": "gemma3_text", **ODD, **GQA, "tie_word_embeddings": False},
    "gemma 3 nested, as on the Hub": {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 96, "intermediate_size": 77, "num_hidden_layers": 7, "sliding_window": 16},
    },
}


FULL_DEPTH = [
    "deepseek-v2-lite",
    "deepseek-v3",
    "gemma-2-9b",
    "gemma-3-27b",
    "gpt-3-175b",
    "gpt-neox-20b",
    "gpt-oss-120b",
    "llama-3.2-3b",
    "llama-4-maverick",
    "mixtral-8x22b",
    "nemotron-4-340b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
]


def transformers_count(config: dict[str, Any]) -> int:
    """Parameters of the language model as transformers builds it, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(config["model_type"], **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built.get_text_config())
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FULL_DEPTH)
def test_presets_equal_transformers_at_full_depth(name: str) -> None:
    assert load_model(name).parameters == transformers_count(json.loads((MODELS / f"{name}.json").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_transformers(case: str) -> None:
    shape = from_hf_config(CASES[case])
    assert shape.parameters == transformers_count(CASES[case])
    assert sum(shape.stage_parameters(i, i + 1).total for i in range(len(shape.layers))) == (
        shape.parameters + (shape.vocab * shape.hidden if shape.tied_embeddings else 0)
    )


def test_every_family_is_compared() -> None:
    compared = {config["model_type"] for config in CASES.values()}
    assert compared == {*FAMILIES, *NESTED} - {"kimi_k2"}  # DeepSeek-V3 under another name


def kinds(shape: ModelShape) -> list[tuple[int, bool]]:
    """Window and mixture-or-not of each layer."""
    return [(layer.attention.window, isinstance(layer.ffn, Moe)) for layer in shape.layers]


def test_layers_alternate_as_configured() -> None:
    text = {**LLAMA4, "num_hidden_layers": 4, "num_key_value_heads": 2, "interleave_moe_layer_step": 2}
    shape = from_hf_config({"model_type": "llama4_text", **text})
    assert kinds(shape) == [(8192, False), (8192, True), (8192, False), (0, True)]
    assert shape.layers[0].attention.chunked
    assert [w for w, _ in kinds(from_hf_config(CASES["gemma 3 nested, as on the Hub"]))] == [16] * 5 + [0, 16]
    assert [w for w, _ in kinds(from_hf_config(CASES["gpt-oss, no bias"]))] == [128, 0, 128]
    assert [m for _, m in kinds(from_hf_config(CASES["deepseek v3"]))] == [False, False, True, True]
    listed = {**CASES["gemma 2"], "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    assert [w for w, _ in kinds(from_hf_config(listed))] == [0, 4096, 0]
    sliding = {**CASES["qwen2"], "use_sliding_window": True, "max_window_layers": 2}
    assert [w for w, _ in kinds(from_hf_config(sliding))] == [0, 0, 4096]


LLAMA = CASES["llama, defaults"]
BAD: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "hidden_size": -96}, r"hidden_size: must be a whole number from 1 to \d+ \(found -96\)"),
    ({**LLAMA, "num_attention_heads": 0}, r"num_attention_heads: must be .* \(found 0\)"),
    ({**LLAMA, "vocab_size": "331"}, r"vocab_size: must be a whole number .*found '331'"),
    ({**LLAMA, "vocab_size": 331.5}, r"vocab_size: must be a whole number"),
    ({**LLAMA, "vocab_size": True}, r"vocab_size: must be a whole number"),
    ({**LLAMA, "num_hidden_layers": 10**12}, r"num_hidden_layers: must be .* from 1 to 10000"),
    ({**LLAMA, "num_key_value_heads": 4}, "num_attention_heads: 6 is not divisible by num_key_value_heads 4"),
    ({**CASES["deepseek v3"], "num_key_value_heads": 5}, "6 is not divisible by num_key_value_heads 5"),
    ({**LLAMA, "num_attention_heads": 7}, "num_attention_heads: 7 must divide hidden_size 96, or head_dim"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
    ({**LLAMA, "model_type": "lama"}, "model_type: 'lama' is unknown; did you mean 'llama'"),
    ({**LLAMA, "model_type": "mamba"}, "model_type: 'mamba' is unknown.*known are deepseek_v2, .*qwen3_moe"),
    ({k: v for k, v in LLAMA.items() if k != "model_type"}, "model_type: required, but missing"),
    ({"architectures": ["BertModel"]}, "architectures: 'BertModel' is unknown"),
    ({"model_type": "mistral", **ODD}, "not divisible by num_key_value_heads 8 .missing"),
    ({**CASES["mixtral"], "num_experts_per_tok": 4}, r"num_experts_per_tok: must be .* from 1 to 3 \(found 4\)"),
    ({**CASES["gemma 2"], "layer_types": ["full_attention"]}, "layer_types: must be a list of num_hidden_layers 3"),
    ({**CASES["gemma 2"], "layer_types": ["linear_attention"] * 3}, "'linear_attention' is none of full_attention"),
    ({**CASES["gpt2"], "hidden_size": 97}, "n_embd: 96 contradicts hidden_size 97"),
    ({**CASES["gpt2"], "add_cross_attention": True}, "add_cross_attention: must be False"),
    ({"model_type": "llama4"}, "text_config: required for model_type 'llama4'"),
    ({**LLAMA, "per_layer_config": {"0": {"head_dim": 3}}}, "per_layer_config: .* not supported"),
    ({k: v for k, v in {**LLAMA, "hidden_sise": 96}.items() if k != "hidden_size"}, "did you mean it by 'hidden_sise'"),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_unusable_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf_config(config)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("case", ["llama 3.1 70B", "qwen3, bias", "deepseek v3", "gpt neox", "gpt-oss, no bias"])
def test_missing_sizes_are_named(case: str, key: str) -> None:
    config = {k: v for k, v in CASES[case].items() if k != key}
    with pytest.raises(ConfigError, match=f"{key}: required, but missing"):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "line 1: not valid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "key 'model_type' is given twice"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00\xff", "not valid JSON"),
        ('{"a": "' + "x" * 2**22 + '"}', "larger than 4 MiB"),
    ],
)
def test_unusable_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_hf_config(path)
    assert str(path) in str(caught.value)


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert from_hf_config(path) == from_hf_config({**LLAMA, "_name_or_path": tmp_path.name})
    with pytest.raises(ConfigError, match="no such file"):
        from_hf_config(tmp_path / "other.json")


def test_the_architecture_stands_in_for_a_missing_model_type() -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    del config["model_type"]
    assert from_hf_config(config).parameters == from_hf_config(LLAMA).parameters
