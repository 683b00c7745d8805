"""The commands `scale-across predict` and `scale-across validate`."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from common import config
from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.estimate import Setup, TrainingJob
from scale_across.measurements import read_cases
from scale_across.model_presets import load_model
from scale_across.parallelism import ORDER, RECOMPUTE, Parallelism, describe, from_mapping
from scale_across.site_network import load_cluster
from scale_across.step import Estimate
from scale_across.topology import Topology
from scale_across.validate import Regret, RowError, SourceScore, overall_bias, regrets, row_error, score

SHIPPED = Path(__file__).resolve().parents[4] / "tests" / "data"
TABLES = ("measured_training.csv", "vtrain_multi_node.csv", "vtrain_single_node.csv", "crosspipe_two_sites.csv")
GIB = 2.0**30

_PARTS = {
    "compute_s": "compute, slowest stage",
    "bubble_s": "pipeline fill",
    "tp_s": "tensor-parallel collectives",
    "cp_s": "context-parallel exchange",
    "ep_s": "expert all-to-all",
    "pp_s": "pipeline messages",
    "dp_s": "data-parallel reduction",
    "optimizer_s": "optimizer",
}
_MEMORY = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_state_bytes": "optimizer state",
    "activations_bytes": "activations",
    "head_bytes": "logits",
    "buffers_bytes": "buffers and context",
}


def predict(
    model: Annotated[str, typer.Argument(help="a preset (llama-3.1-405b) or a Hugging Face config.json")],
    cluster: Annotated[str, typer.Argument(help="a cluster.yaml or a preset (llama3-24k, meta-region)")],
    tp: Annotated[int, typer.Option(help="tensor parallelism")] = 1,
    cp: Annotated[int, typer.Option(help="context parallelism")] = 1,
    ep: Annotated[int, typer.Option(help="expert parallelism")] = 1,
    etp: Annotated[int, typer.Option(help="tensor parallelism inside an expert")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline stages")] = 1,
    dp: Annotated[int, typer.Option(help="data parallelism; 0 fills the cluster")] = 0,
    chunks: Annotated[int, typer.Option(help="model chunks per stage (interleaving)")] = 1,
    microbatch: Annotated[int, typer.Option(help="sequences per microbatch")] = 1,
    zero: Annotated[int, typer.Option(help="0 replicated, 1 optimizer, 2 gradients, 3 parameters sharded")] = 1,
    shard: Annotated[int, typer.Option(help="ranks that ZeRO shards over; 0: all; fewer is HSDP")] = 0,
    recompute: Annotated[str, typer.Option(help=", ".join(RECOMPUTE))] = "none",
    sequence_parallel: Annotated[bool, typer.Option(help="split norms over tensor ranks")] = True,
    outermost: Annotated[str, typer.Option(help="axis that crosses sites: " + " or ".join(ORDER))] = "dp",
    hierarchical: Annotated[bool, typer.Option("--hierarchical", help="reduce gradients level by level")] = False,
    global_batch: Annotated[int, typer.Option(help="sequences per step")] = 1024,
    seq_len: Annotated[int, typer.Option(help="tokens per sequence")] = 8192,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp8, fp32")] = "bf16",
    stack: Annotated[str, typer.Option(help="software stack, or a YAML file")] = "megatron-2024",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value over the cluster file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Predict one training step: where its time goes, what a GPU holds, and how far it is from the bound.

    Example: scale-across predict llama-3.1-405b llama3-24k --tp 8 --pp 16 --chunks 8 --dp 64 --global-batch 2048
    """
    shape = load_model(model)
    topology = _topology(cluster, overrides or [])
    job = config.validate(
        TrainingJob,
        {
            "model": model,
            "global_batch": global_batch,
            "seq_len": seq_len,
            "dtype": dtype,
            "stack": stack,
        },
        where="options",
    )
    per_replica = max(1, tp) * max(1, cp) * max(1, pp)
    plan = from_mapping(
        {
            "tp": tp, "cp": cp, "ep": ep, "etp": etp, "pp": pp, "dp": dp or max(1, topology.spec.gpus // per_replica),
            "chunks": chunks, "microbatch": microbatch, "zero": zero, "shard": shard, "recompute": recompute,
            "sp": int(sequence_parallel and tp > 1), "order": outermost, "reduction": int(hierarchical),
        }
    )  # fmt: skip
    setup = Setup.of(shape, topology, job)
    setup.check(plan, topology.spec.gpus)
    estimate = setup.estimate(plan)
    tiers_s = setup.exposed_by_tier(plan, estimate)
    refused = _memory_fault(estimate, setup.gpu.memory_bytes)
    if as_json:
        values = {key: float(value) for key, value in estimate._asdict().items()}
        print(
            json.dumps({"plan": plan._asdict(), "fits": not refused, "exposed_by_tier_s": tiers_s, **values}, indent=1)
        )
    else:
        Console().print(*_prediction_tables(plan, estimate, tiers_s, setup.gpu.memory_bytes), sep="\n")
    if refused:
        raise ConfigError(refused)


def _topology(name_or_path: str, overrides: list[str]) -> Topology:
    if not overrides:
        return Topology.load(name_or_path)
    data = config.apply_overrides(load_cluster(name_or_path).model_dump(mode="json"), overrides)
    return Topology.from_cluster(config.validate(ClusterSpec, data, where=name_or_path))


def _memory_fault(estimate: Estimate, memory_bytes: float) -> str:
    """Why the plan does not fit, with the sum; empty when it does."""
    if estimate.memory_bytes <= memory_bytes:
        return ""
    parts = " + ".join(f"{text} {getattr(estimate, key) / GIB:.1f}" for key, text in _MEMORY.items())
    return (
        f"memory: {parts} = {estimate.memory_bytes / GIB:.1f} GiB, but a GPU has {memory_bytes / GIB:.0f} GiB; "
        "raise tp, pp, zero or recompute, or lower microbatch or chunks"
    )


def _prediction_tables(
    plan: Parallelism, estimate: Estimate, tiers_s: dict[str, float], memory_bytes: float
) -> list[Table]:
    step = Table(title=f"One step: {estimate.total_s:.3f} s ({describe(plan)})", title_justify="left")
    for column in ("part", "seconds", "share"):
        step.add_column(column, justify="left" if column == "part" else "right")
    for key, text in _PARTS.items():
        value = getattr(estimate, key)
        if value > 0:
            step.add_row(text, f"{value:.3f}", f"{value / estimate.total_s:.1%}")
    inside = {f"exposed at tier {tier}": value for tier, value in tiers_s.items()} | {"host waits": estimate.host_s}
    for text, value in inside.items():
        step.add_row(f"  of it {text}", f"{value:.3f}", f"{value / estimate.total_s:.1%}", style="dim")
    step.add_section()
    step.add_row("lower bound", f"{estimate.bound_s:.3f}", f"{estimate.bound_s / estimate.total_s:.1%}")
    rates = Table(title="Rates", title_justify="left", show_header=False)
    rates.add_row("tokens/s per GPU", f"{estimate.tokens_per_s_per_gpu:,.0f}")
    rates.add_row("TFLOP/s per GPU", f"{estimate.tflops_per_gpu:.0f}")
    rates.add_row("MFU (model FLOPs, full attention)", f"{estimate.mfu:.1%}")
    rates.add_row("HFU (with recompute)", f"{estimate.hfu:.1%}")
    total = f"Memory per GPU: {estimate.memory_bytes / GIB:.1f} of {memory_bytes / GIB:.0f} GiB"
    memory = Table(title=total, title_justify="left")
    memory.add_column("part")
    memory.add_column("GiB", justify="right")
    for key, text in _MEMORY.items():
        memory.add_row(text, f"{getattr(estimate, key) / GIB:.2f}")
    return [step, rates, memory]


def validate(
    files: Annotated[list[Path] | None, typer.Argument(help="measurements as CSV; none: those of tests/data")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="each row's prediction")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list of objects")] = False,
    regret: Annotated[bool, typer.Option("--regret", help="what choosing by prediction costs, per model")] = False,
    sites: Annotated[int, typer.Option(help="equal sites of a file with CrossPipe's columns")] = 2,
) -> None:
    """Compare predictions with published measurements.

    Errors are of the step time, predicted over measured minus 1, so a positive one means predicted too slow. vTrain's
    single-node rows are composed, not raw measurements: they are scored by cell (hidden, TP, microbatch).

    Example: scale-across validate my_runs.csv --rows
    """
    pipelines = [path for path in files or _shipped() if _is_crosspipe(path)]
    cases = [case for path in files or _shipped() if path not in pipelines for case in read_cases(path)]
    errors = [row_error(case) for case in cases]
    for path in pipelines:
        from scale_across.validate_crosspipe import row_errors  # compiles schedules

        errors += row_errors(path, sites)
    if rows:
        _print_rows(errors, as_json)
        return
    scores = score(errors)
    if as_json:
        print(json.dumps([_plain_score(line) for line in scores], indent=1))
        return
    Console().print(_score_table(scores))
    if regret:
        Console().print(_regret_table(regrets(errors[: len(cases)], cases)))


def _shipped() -> list[Path]:
    if not SHIPPED.is_dir():
        raise ConfigError(
            "validate: the measurements are in the repository's tests/data, not in the package; name files"
        )
    return [SHIPPED / name for name in TABLES]


def _is_crosspipe(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a table ({error})") from None
    return {"lat_over_tf", "bw_over_tf", "seconds_per_microbatch"} <= {name.strip() for name in header}


def _plain_score(line: SourceScore) -> dict[str, object]:
    wanted = ("source", "rows", "mean_abs_error", "median_abs_error", "bias", "worst")
    return {key: value for key, value in asdict(line).items() if key in wanted} | {"cells": line.cells}


def _score_table(scores: list[SourceScore]) -> Table:
    training = [line for line in scores if not line.source.startswith("crosspipe")]
    table = Table(title="Predicted against measured step time", title_justify="left", caption_justify="left")
    if training:
        table.caption = f"overall bias of training steps {overall_bias(training):+.1%}, sources weighted equally"
    for column in ("source", "rows", "cells", "mean abs", "median abs", "bias", "worst"):
        table.add_column(column, justify="left" if column == "source" else "right", overflow="fold")
    for s in scores:
        table.add_row(
            s.source, str(s.rows), str(s.cells), f"{s.mean_abs_error:.1%}", f"{s.median_abs_error:.1%}",
            f"{s.bias:+.1%}", f"{s.worst:+.1%}",
        )  # fmt: skip
    return table


def _print_rows(errors: list[RowError], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in errors], indent=1))
        return
    table = Table(title="Rows", title_justify="left")
    for column in ("source", "run", "metric", "measured", "predicted", "error", "note"):
        table.add_column(column, overflow="fold")
    for row in errors:
        numbers = (f"{row.measured:.4g}", f"{row.predicted:.4g}", f"{row.error:+.1%}")
        table.add_row(row.source, row.label, row.metric, *numbers, row.note)
    Console().print(table)


def _regret_table(found: list[Regret]) -> Table:
    table = Table(title="Measured time of the predicted best plan over the measured best", title_justify="left")
    for column in ("model", "plans", "regret", "predicted best", "measured best"):
        table.add_column(column, overflow="fold")
    several = [line for line in found if not line.model.startswith("vtrain_single")]
    for line in several:
        table.add_row(line.model, str(line.plans), f"{line.regret:.1%}", line.chosen, line.best)
    single = [line.regret for line in found if line.model.startswith("vtrain_single")]
    if single:
        text = f"vtrain_single_node: {len(single)} jobs, mean (median, worst)"
        table.add_row(text, "", f"{np.mean(single):.1%} ({np.median(single):.1%}, {max(single):.1%})", "", "")
    return table
