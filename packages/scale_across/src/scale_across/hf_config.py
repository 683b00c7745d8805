"""Hugging Face `config.json` to `ModelShape`, without transformers.

This module reads the file and finds the family; `hf_families` has one function for each. Parameter counts equal
transformers' own exactly (tests/scale_across/test_hf_config.py).
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from common.config import MAX_FILE_BYTES, ConfigError
from scale_across.hf_families import FAMILIES, Keys
from scale_across.model import ModelShape

NESTED = {"llama4": "llama4_text", "gemma3": "gemma3_text"}
"""Multimodal families: the text model is under `text_config`."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "GptOssForCausalLM": "gpt_oss",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "NemotronForCausalLM": "nemotron",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
"""Consulted when `model_type` is missing."""


def from_hf_config(config: dict[str, Any] | str | os.PathLike[str]) -> ModelShape:
    """The shape of the model that a Hugging Face configuration describes.

    Args:
        config: the parsed `config.json`, its path, or the folder that holds it.

    Raises:
        ConfigError: unreadable or oversized file, no JSON object, unknown architecture, a missing, wrong or
            contradicting key. The text names key, value and what is valid.
    """
    if isinstance(config, dict):
        return _read(config, str(config.get("_name_or_path") or "config.json"))
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    data = _read_json(path)
    name = path.parent.name if path.name == "config.json" else path.stem
    return _read({"_name_or_path": name, **data}, str(path))


def _read(data: dict[str, Any], where: str) -> ModelShape:
    kind = _model_type(data, where)
    if kind in NESTED:
        text = data.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: text_config: required for model_type {kind!r} (found {type(text).__name__})")
        shared = ("_name_or_path", "tie_word_embeddings") if kind == "gemma3" else ("_name_or_path",)
        inherited: dict[str, Any] = {key: data[key] for key in shared if key in data}
        return _read({**inherited, **text, "model_type": NESTED[kind]}, f"{where}: text_config")
    keys = Keys({**data, "model_type": kind}, where)
    keys.must_be("is_encoder_decoder", False, "only decoder-only models are known")
    if data.get("per_layer_config"):
        raise keys.fault("per_layer_config", "layers with settings of their own are not supported; remove the key")
    return FAMILIES[kind](keys)


def _model_type(data: dict[str, Any], where: str) -> str:
    known = sorted({*FAMILIES, *NESTED})
    kind = data.get("model_type")
    if kind is None:
        names = data.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        if isinstance(first, str) and first in ARCHITECTURES:
            return ARCHITECTURES[first]
        if first is None:
            raise ConfigError(f"{where}: model_type: required, but missing; known are {', '.join(known)}")
        raise ConfigError(f"{where}: architectures: {first!r} is unknown; known are {', '.join(ARCHITECTURES)}")
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: model_type: {str(kind)[:60]!r} is unknown{hint}; known are {', '.join(known)}")
    return str(kind)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB; is this a config.json?")
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {path.parent.resolve()})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a model configuration: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ConfigError(f"key {twice!r} is given twice")
    return data
