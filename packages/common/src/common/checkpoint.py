"""Checkpoints that survive a crash at any moment: safetensors and JSON, written aside, synced, renamed. No pickles.

A checkpoint is a folder `step-000120/` with `tensors.safetensors` and `meta.json` (which holds the tensors' SHA-256).
The rename comes last, so a folder of that name is complete; a damaged one is still recognised by its sum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from common.config import ConfigError

TENSORS, META = "tensors.safetensors", "meta.json"
_NAME = re.compile(r"step-(\d{6,})")


class CorruptCheckpoint(ConfigError):
    """A checkpoint's files are missing or do not match their sum."""


@dataclass(frozen=True)
class Checkpoint:
    """What `load` returns: tensors on the CPU, and the JSON values saved beside them."""

    step: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


def save(root: Path, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any], keep: int = 3) -> Path:
    """Write `root/step-NNNNNN` and drop all but the newest `keep`; an existing folder of that step is replaced.

    Raises:
        OSError: the disk is full or read-only; nothing that was there before is lost.
    """
    root.mkdir(parents=True, exist_ok=True)
    final, aside = root / f"step-{step:06d}", root / f".writing-{step:06d}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        data = safetensors.torch.save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
        _write_synced(aside / TENSORS, data)
        record = {"step": step, "sha256": hashlib.sha256(data).hexdigest(), "meta": meta}
        _write_synced(aside / META, json.dumps(record, indent=1, allow_nan=False).encode())
        if final.exists():
            final.rename(aside / "replaced")
        aside.rename(final)
        shutil.rmtree(final / "replaced", ignore_errors=True)
        _sync_folder(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Read one checkpoint folder.

    Raises:
        CorruptCheckpoint: a file is missing or unreadable, or the tensors do not match their sum.
    """
    try:
        record = json.loads((path / META).read_text())
        data = (path / TENSORS).read_bytes()
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise CorruptCheckpoint(
                f"{path}: {TENSORS} does not match its SHA-256; it was damaged after it was written"
            )
        return Checkpoint(int(record["step"]), safetensors.torch.load(data), record["meta"])
    except CorruptCheckpoint:
        raise
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CorruptCheckpoint(f"{path}: not a readable checkpoint ({type(error).__name__}: {error})") from None


def load_latest(root: Path) -> Checkpoint | None:
    """The newest readable checkpoint under `root`, or None when there has never been one.

    A damaged one is passed over with a warning.

    Raises:
        CorruptCheckpoint: there are checkpoints, and every one is damaged.
    """
    folders = list_checkpoints(root)
    for folder in reversed(folders):
        try:
            return load(folder)
        except CorruptCheckpoint as error:
            warnings.warn(f"{error}; falling back to the one before", stacklevel=2)
    if folders:
        raise CorruptCheckpoint(
            f"{root}: all {len(folders)} checkpoints are damaged; remove the folder to start afresh"
        )
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
