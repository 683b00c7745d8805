from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common import checkpoint
from common.checkpoint import CorruptCheckpoint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 7, TENSORS, {"note": "x"})
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.meta) == (7, {"note": "x"})
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())


def test_only_the_newest_are_kept_and_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 10):
        checkpoint.save(tmp_path, step, TENSORS, {"step": step}, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000003", "step-000010"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "no meta", "bad meta"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, damage: str) -> None:
    checkpoint.save(tmp_path, 1, TENSORS, {})
    newest = checkpoint.save(tmp_path, 2, TENSORS, {})
    file = newest / checkpoint.TENSORS
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:10])
    elif damage == "no meta":
        (newest / checkpoint.META).unlink()
    else:
        (newest / checkpoint.META).write_text(json.dumps({"step": 2}))
    with pytest.warns(UserWarning, match="falling back"):
        found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    with pytest.raises(CorruptCheckpoint, match="step-000002"):
        checkpoint.load(newest)


def test_all_damaged_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "nothing") is None
    folder = checkpoint.save(tmp_path, 1, TENSORS, {})
    (folder / checkpoint.TENSORS).unlink()
    with pytest.warns(UserWarning, match="falling back"), pytest.raises(CorruptCheckpoint, match="remove the folder"):
        checkpoint.load_latest(tmp_path)


def test_a_failed_write_loses_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, TENSORS, {"ok": True})
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.save(tmp_path, 1, TENSORS, {"bad": float("nan")})
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.meta == {"ok": True}
    assert len(list(tmp_path.iterdir())) == 1
