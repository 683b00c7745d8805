"""Published measurements as cases to predict: three CSV formats, recognised by their header.

An empty cell means that the publication does not say. Then every plausible value is tried and the fastest that fits
memory is taken (the fastest if none fits), as the authors tuned theirs; `Case.free` says which keys were chosen so.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.config import MAX_FILE_BYTES, ConfigError
from scale_across import hardware, stack
from scale_across.collectives import Tiers
from scale_across.hardware import Accelerator
from scale_across.model import ModelShape, gpt
from scale_across.model_presets import load_model
from scale_across.parallelism import DP_OUTERMOST, FULL, NONE, RECOMPUTE, Parallelism, from_mapping
from scale_across.stack import Stack

Row = Mapping[str, str]
MEASURED_COLUMNS = tuple(
    [
        "source",
        "model",
        "accelerator",
        "gpus_per_node",
        "gpus",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "vocab",
        "seq_len",
        "global_batch",
        "microbatch",
        "tp",
        "cp",
        "pp",
        "dp",
        "ep",
        "interleave",
        "schedule",
        "recompute",
        "metric",
        "value",
    ]
)
"""Of measured_training.csv, which also has a column `note`."""
VTRAIN_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
)  # fmt: skip
METRICS = {
    "iteration_s": "total_s",
    "tflops_per_gpu": "causal_tflops_per_gpu",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
}
"""Metric of a row → column of an estimate. TFLOP/s are read with the causal half of attention, without recompute."""


@dataclass(frozen=True)
class Case:
    """One measured run."""

    source: str
    label: str
    cell: str
    """Cases of one cell are one measurement for the score: their errors are averaged first."""
    model: ModelShape
    accelerator: Accelerator
    stack: Stack
    tiers_TF: Tiers
    plans: tuple[Parallelism, ...]
    free: tuple[str, ...]
    global_batch: int
    seq_len: int
    metric: str
    measured: float


def flat_tiers(accelerator: Accelerator, gpus_per_node: int, network_gbps: float | None = None) -> Tiers:
    """Two tiers, the node's fabric and one full-bisection network, at the bandwidths that collectives reach."""
    c = accelerator.calibration
    network = (network_gbps or accelerator.network_gbps) / 8 * 1e9 * c.network_fraction
    fabric = accelerator.fabric_gbytes_per_s * 1e9 * c.fabric_fraction
    return np.array(
        [
            [gpus_per_node, fabric, accelerator.fabric_latency_us * 1e-6],
            [1e9, network, accelerator.network_latency_us * 1e-6],
        ]
    )


def read_cases(path: Path) -> list[Case]:
    """All cases of a CSV file.

    Raises:
        ConfigError: unreadable, an unknown header, or a bad value; names file, line, column and what would be valid.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; this is no table of measurements")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error})") from None
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    convert = _converter(path, header)
    cases = []
    for number, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise ConfigError(f"{path}: line {number} has not the {len(header)} columns of the header")
        try:
            cases.append(convert({key: value.strip() for key, value in row.items()}, path.stem))
        except ConfigError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
    if not cases:
        raise ConfigError(f"{path}: no rows below the header")
    return cases


def _converter(path: Path, header: list[str]) -> Callable[[Row, str], Case]:
    if set(MEASURED_COLUMNS) <= set(header):
        return _measured_case
    if set(VTRAIN_COLUMNS) <= set(header):
        return _vtrain_case
    missing = [name for name in MEASURED_COLUMNS if name not in header]
    raise ConfigError(
        f"{path}: header {','.join(header)[:200]!r} is neither that of measured_training.csv (missing: "
        f"{', '.join(missing[:6])}...), nor of the vTrain or CrossPipe files"
    )


def _number(row: Row, key: str, kind: type = int, default: float | None = None) -> float:
    text = row.get(key, "")
    if text == "" and default is not None:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{key} is {text!r}; it must be a number above 0") from None
    if not value > 0 or value == float("inf"):
        raise ConfigError(f"{key} is {text!r}; it must be a number above 0")
    return float(value)


def _whole(row: Row, key: str, default: int | None = None) -> int:
    return int(_number(row, key, int, default))


# -- vTrain --------------------------------------------------------------------------------------------------------


def _vtrain_case(row: Row, stem: str) -> Case:
    """vTrain (Bang et al., arXiv 2312.12391): Megatron on A100 nodes with 4 x 200 Gb/s each.

    Not stated and inferred from the rows: several nodes recompute everything, one node nothing; there, with one tensor
    rank, the loss takes three times what a padded vocabulary would, as for GPT-2's 50,257 entries without padding.
    """
    tp, dp, pp = (_whole(row, f"{axis} parallelism") for axis in ("tensor", "data", "pipeline"))
    microbatch, batch = _whole(row, "micro batch"), _whole(row, "global batch")
    layers, hidden, heads = _whole(row, "# layers"), _whole(row, "hidden size"), _whole(row, "attention heads")
    seq = _whole(row, "sequence length")
    gpus = _whole(row, "# GPUs")
    multi = gpus > 8 or "multi" in stem
    plan = Parallelism(tp=tp, pp=pp, dp=dp, microbatch=microbatch, recompute=FULL if multi else NONE)
    vocab = 51200 if multi or tp > 1 else 50257
    _check_product(plan, gpus)
    _check_batch(plan, batch)
    gpu = hardware.accelerator("a100-80g")
    label = f"h{hidden} l{layers} tp{tp} dp{dp} pp{pp} mb{microbatch} gb{batch}"
    return Case(
        source="vtrain_multi_node" if multi else "vtrain_single_node",
        label=label,
        cell=label if multi else f"h{hidden} tp{tp} mb{microbatch}",
        model=gpt(layers, hidden, heads, vocab=vocab, seq_len=seq),
        accelerator=gpu,
        stack=stack.stack("megatron-deepspeed"),
        tiers_TF=flat_tiers(gpu, 8, network_gbps=100.0),
        plans=(plan,),
        free=(),
        global_batch=batch,
        seq_len=seq,
        metric="iteration_s",
        measured=_number(row, "iteration time (ms)", float) / 1e3,
    )


def _check_product(plan: Parallelism, gpus: int) -> None:
    if plan.gpus != gpus:
        raise ConfigError(f"tp x cp x pp x dp = {plan.gpus}, but the row has {gpus} GPUs")


def _check_batch(plan: Parallelism, batch: int) -> None:
    if batch % (plan.dp * plan.microbatch):
        raise ConfigError(f"dp {plan.dp} x microbatch {plan.microbatch} does not divide the global batch {batch}")


# -- measured_training.csv -----------------------------------------------------------------------------------------


def _measured_case(row: Row, stem: str) -> Case:
    gpu = hardware.accelerator(row["accelerator"])
    model = _model(row)
    chosen_stack = _stack(row, gpu)
    batch, seq, gpus = _whole(row, "global_batch"), _whole(row, "seq_len"), _whole(row, "gpus")
    plans, free = _plans(row, model, chosen_stack, batch)
    if row["metric"] not in METRICS:
        raise ConfigError(f"metric is {row['metric']!r}; it can be {', '.join(METRICS)}")
    tiers_TF = flat_tiers(gpu, _whole(row, "gpus_per_node", gpu.node_gpus))
    if "pods" in row.get("note", "") or row["source"].startswith("llama3"):
        tiers_TF = with_pods(tiers_TF, pod_gpus=3072, oversubscription=7.0)
    label = f"{row['model']} {gpus} GPUs tp{row['tp']} cp{row['cp']} pp{row['pp']} dp{row['dp']} {row['recompute']}"
    return Case(
        source=row["source"],
        label=label,
        cell=f"{label} {row['value']}",
        model=model,
        accelerator=gpu,
        stack=chosen_stack,
        tiers_TF=tiers_TF,
        plans=plans,
        free=free,
        global_batch=batch,
        seq_len=seq,
        metric=row["metric"],
        measured=_number(row, "value", float),
    )


def with_pods(tiers_TF: Tiers, pod_gpus: int, oversubscription: float) -> Tiers:
    """Cut the outermost tier into full-bisection pods with less bandwidth between them (Llama 3: 3,072 GPUs, 1:7)."""
    outer = tiers_TF[-1].copy()
    pod, between = outer.copy(), outer.copy()
    pod[0] = pod_gpus
    between[1] /= oversubscription
    between[2] *= 2
    return np.vstack([tiers_TF[:-1], pod, between])


def _model(row: Row) -> ModelShape:
    """A preset when the name and the shape agree with one, else a model from the columns."""
    layers, hidden, heads = _whole(row, "layers"), _whole(row, "hidden"), _whole(row, "heads")
    try:
        preset = load_model(row["model"])
    except ConfigError:
        preset = None
    if preset and (len(preset.layers), preset.hidden) == (layers, hidden):
        return preset
    ffn, kv_heads = _whole(row, "ffn", 4 * hidden), _whole(row, "kv_heads", heads)
    vocab, seq = _whole(row, "vocab", 51200), _whole(row, "seq_len")
    shape = gpt(layers, hidden, heads, vocab=vocab, seq_len=seq, ffn=ffn, name=row["model"])
    if ffn == 4 * hidden and kv_heads == heads:
        return shape
    layer = shape.layers[0]
    gated = replace(
        layer,
        attention=replace(layer.attention, kv_heads=kv_heads, qkv_bias=False, out_bias=False),
        ffn=replace(layer.ffn, gated=True, bias=False),
        norm_bias=False,
    )
    return replace(shape, layers=(gated,) * layers, tied_embeddings=False, learned_positions=False)


def _stack(row: Row, gpu: Accelerator) -> Stack:
    """The software stack by what the source ran; for an unknown source by the accelerator's generation."""
    source, note = row["source"].lower(), row.get("note", "").lower()
    if "torchtitan" in source:
        return stack.stack("torchtitan-eager" if "without torch.compile" in note else "torchtitan-compile")
    if "llama3" in source:
        return stack.stack("meta-2024")
    if gpu.name.startswith(("v100", "a100")):
        return stack.stack("megatron-2022" if "korthikanti" in source else "megatron-2021")
    return stack.stack("megatron-2024")


def _plans(row: Row, model: ModelShape, chosen: Stack, batch: int) -> tuple[tuple[Parallelism, ...], tuple[str, ...]]:
    """Every plan that agrees with the row, and the keys that it leaves open."""
    note, schedule, layers = row.get("note", "").lower(), row.get("schedule", ""), len(model.layers)
    gpus, heads = _whole(row, "gpus"), model.layers[0].attention.heads
    free: list[str] = []
    axes: dict[str, list[Any]] = {
        "tp": _plausible(row, "tp", [t for t in (1, 2, 4, 8) if heads % t == 0], free),
        "cp": [_whole(row, "cp", 1)],
        "ep": [_whole(row, "ep", 1)],
        "pp": _plausible(row, "pp", [p for p in range(1, 65) if layers % p == 0 or (layers + 2) % p == 0], free),
        "dp": _plausible(row, "dp", [d for d in range(1, gpus + 1) if gpus % d == 0 and batch % d == 0], free),
        "microbatch": _plausible(row, "microbatch", [1, 2, 4, 8], free),
        "recompute": [row["recompute"]] if row.get("recompute") else list(RECOMPUTE),
        "interleave": _plausible(row, "interleave", list(range(1, 33)) if "interleaved" in schedule else [1], free),
    }
    if not row.get("recompute"):
        free.append("recompute")
    told_sp = "sequence parallelism" in note and "no sequence parallelism" not in note
    fixed = {
        "zero": 3 if "torchtitan" in chosen.name else int(chosen.flash_attention),
        "order": DP_OUTERMOST if row["source"].startswith("llama3") else "pp",
    }
    plans = []
    for values in itertools.product(*axes.values()):
        found = dict(zip(axes, values, strict=True))
        chunks = int(found.pop("interleave"))
        tp, pp, dp = int(found["tp"]), int(found["pp"]), int(found["dp"])
        if tp * int(found["cp"]) * pp * dp != gpus or batch % (dp * int(found["microbatch"])):
            continue
        stages_fit = layers % (pp * chunks) == 0 or (layers + 2) % (pp * chunks) == 0
        microbatches = batch // (dp * int(found["microbatch"]))
        if chunks > 1 and (not stages_fit or pp == 1 or microbatches % pp):
            continue
        sp = int(tp > 1 and (chosen.flash_attention or told_sp))
        etp = tp if int(found["ep"]) > 1 else 1
        plans.append(from_mapping({**found, **fixed, "chunks": chunks, "sp": sp, "etp": etp}))
    if not plans:
        product = " x ".join(f"{axis} {row.get(axis) or '?'}" for axis in ("tp", "cp", "pp", "dp"))
        raise ConfigError(
            f"{product}, microbatch {row.get('microbatch') or '?'}, interleave {row.get('interleave') or '?'} do not "
            f"divide the {gpus} GPUs, the {layers} layers and the global batch {batch}"
        )
    return tuple(plans), tuple(free)


def _plausible(row: Row, key: str, values: list[int], free: list[str]) -> list[int]:
    if row.get(key, "") != "":
        return [_whole(row, key)]
    if len(values) > 1:
        free.append(key)
    return values
