"""Models by name: the configurations in `data/models/`, each in the form of a Hugging Face `config.json`."""

from __future__ import annotations

import difflib
import json
import os
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from common.config import ConfigError
from scale_across.hf_config import from_hf_config
from scale_across.model import ModelShape

# Names under which a preset is also known, as written by `_plain`.
_ALIASES = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-405b": "llama-3.1-405b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "mistral-7b-v0.1": "mistral-7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "deepseek-r1": "deepseek-v3",
    "gpt-3": "gpt-3-175b",
    "gpt3-175b": "gpt-3-175b",
    "gpt3": "gpt-3-175b",
    "nemotron-4-340b-base": "nemotron-4-340b",
}


def preset_names() -> list[str]:
    """Names that `load_model` knows, sorted."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


def load_model(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """The model of a preset name (`llama-3.1-405b`, any case, with or without the Hub's owner) or of a `config.json`.

    Raises:
        ConfigError: neither a preset nor a usable file; the text names the nearest presets.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if path.is_file() or (path / "config.json").is_file():
        return from_hf_config(path)
    names = preset_names()
    plain = _plain(text)
    name = _ALIASES.get(plain, plain)
    if name not in names:
        if text.endswith(".json") or text.startswith((".", "/", "~")):
            raise ConfigError(f"model {text!r}: no such file; give a config.json or one of {', '.join(names)}")
        near = difflib.get_close_matches(name, [*names, *_ALIASES], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"presets are {', '.join(names)}"
        raise ConfigError(f"model {text!r}: no such preset or file; {hint}")
    config = json.loads(_folder().joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return from_hf_config({**config, "_name_or_path": name})


def _folder() -> Traversable:
    return files("scale_across").joinpath("data", "models")


def _plain(text: str) -> str:
    """`meta-llama/Llama-3.1-8B-Instruct` to `llama-3.1-8b`."""
    plain = re.sub(r"[\s_]+", "-", text.rsplit("/", 1)[-1].strip().lower()).replace("meta-llama", "llama")
    return re.sub(r"-(instruct|it|chat|hf|base)$", "", plain)
