"""Configuration files: YAML in, a validated frozen model out, or one error that says what to change.

Every file a user writes (cluster, job, training configuration) passes through `load`. The error text names the key,
the value found there and what would be valid, because it is what a person sees at the end of `ray job submit`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

MAX_FILE_BYTES = 4 * 2**20
"""A configuration is written by hand; anything larger is a wrong path or an attack."""


class ConfigError(ValueError):
    """Input that cannot be used. The text is complete in itself and is shown without a traceback."""


class Config(BaseModel):
    """Base of all configuration models: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


ConfigT = TypeVar("ConfigT", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader without aliases (they allow exponential expansion) and without silent duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"alias *{event.anchor}: aliases are not allowed, write the value out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read one YAML (or JSON) mapping from `path`.

    Raises:
        ConfigError: the file is missing, unreadable, too large, not YAML, or not a mapping.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB; is this a configuration file?")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such file (looked in {path.parent.resolve()}){hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, where: str = "input") -> dict[str, Any]:
    """Parse YAML text that must hold one mapping; `where` names the source in errors."""
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected `key: value` lines, found {type(data).__name__}")
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `a.b.c=value` (or `sites.0.gpus=8`) applied; values are parsed as YAML.

    Raises:
        ConfigError: an override has no `=`, walks through a value that is no mapping, or names an index out of range.
    """
    result = _copy(data)
    for override in overrides:
        path, sep, text = override.partition("=")
        if not sep or not path.strip():
            raise ConfigError(f"--set {override!r}: write it as key=value, for example --set train.steps=20")
        try:
            value = yaml.load(text, Loader=_StrictLoader) if text.strip() else None
        except yaml.YAMLError:
            raise ConfigError(f"--set {override!r}: the value {text!r} is not valid YAML; quote it") from None
        _assign(result, path.strip().split("."), value, override)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _assign(node: Any, keys: Sequence[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f"--set {override!r}: {key!r} is no index into a list of {len(node)} entries")
            slot: Any = int(key)
        elif isinstance(node, dict):
            slot = key
        else:
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[:depth])} is a single value and has no key {key!r}")
        if last:
            node[slot] = value
        else:
            if isinstance(node, dict) and node.get(slot) is None:
                node[slot] = {}
            node = node[slot]


def validate(model: type[ConfigT], data: Any, where: str = "input") -> ConfigT:
    """Build `model` from plain data.

    Raises:
        ConfigError: one line per fault: key, value found, what would be valid; unknown keys name the nearest known one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [_explain(model, fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{where}: " + "; ".join(faults[:8])) from None


def load(path: str | os.PathLike[str], model: type[ConfigT], overrides: Iterable[str] = ()) -> ConfigT:
    """Read `path`, apply `overrides` and validate as `model`; see `read_yaml`, `apply_overrides` and `validate`."""
    return validate(model, apply_overrides(read_yaml(path), overrides), where=str(path))


def _explain(model: type[BaseModel], fault: Any) -> str:
    loc = ".".join(str(part) for part in fault["loc"]) or "(top level)"
    if fault["type"] == "extra_forbidden":
        known = _known_keys(model, fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{loc}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{loc}: required, but missing"
    message = fault["msg"].removeprefix("Value error, ")
    found = repr(fault.get("input"))
    return f"{loc}: {message}" + (f" (found {found})" if len(found) < 80 and loc != "(top level)" else "")


def _known_keys(model: Any, loc: Sequence[Any]) -> list[str]:
    """Field names of the model that `loc` points into, following fields and looking inside containers."""
    for part in loc:
        if isinstance(part, str) and _is_model(model) and part in model.model_fields:
            model = _inner_model(model.model_fields[part].annotation)
    return sorted(model.model_fields) if _is_model(model) else []


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _inner_model(annotation: Any) -> Any:
    if _is_model(annotation):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _inner_model(argument)
        if inner is not None:
            return inner
    return None
