"""The step model against published measurements: errors by source, as `scale-across validate` prints them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from scale_across.estimate import Setup, TrainingJob
from scale_across.measurements import METRICS, Case
from scale_across.parallelism import Parallelism, describe
from scale_across.step import Estimate


@dataclass(frozen=True)
class RowError:
    """One measured run and its prediction. `error` is predicted over measured step time, minus 1."""

    source: str
    label: str
    cell: str
    metric: str
    measured: float
    predicted: float
    error: float
    plan: str
    note: str
    """What the publication leaves open and was chosen here."""


@dataclass(frozen=True)
class SourceScore:
    """Errors over one source; rows of one cell are averaged first."""

    source: str
    rows: int
    cells: int
    mean_abs_error: float
    median_abs_error: float
    bias: float
    worst: float


def setup_of(case: Case) -> Setup:
    """A case as the formulas take it."""
    job = TrainingJob(model=case.model.name, global_batch=case.global_batch, seq_len=case.seq_len)
    return Setup.from_parts(case.model, [case.accelerator], case.stack, case.tiers_TF, job)


def predict(case: Case, setup: Setup | None = None) -> tuple[Estimate, Parallelism]:
    """The estimate of the case's plan; where the publication leaves something open, of the fastest that fits memory."""
    setup = setup or setup_of(case)
    if len(case.plans) == 1:
        return setup.estimate(case.plans[0]), case.plans[0]
    found = [(setup.estimate(plan), plan) for plan in case.plans]
    fitting = [pair for pair in found if pair[0].memory_bytes <= setup.gpu.memory_bytes]
    return min(fitting or found, key=lambda pair: pair[0].total_s)


def row_error(case: Case) -> RowError:
    """Predict one case and compare. A rate is inverted, so that a positive error always means predicted too slow."""
    estimate, plan = predict(case)
    predicted = getattr(estimate, METRICS[case.metric])
    ratio = predicted / case.measured if case.metric == "iteration_s" else case.measured / predicted
    chosen = ", ".join(f"{key} not published, took {_value(plan, key)}" for key in case.free)
    return RowError(
        case.source, case.label, case.cell, case.metric, case.measured, float(predicted), float(ratio - 1),
        describe(plan), chosen,
    )  # fmt: skip


def _value(plan: Parallelism, key: str) -> int:
    return int(getattr(plan, {"interleave": "chunks"}.get(key, key)))


def score(errors: Sequence[RowError]) -> list[SourceScore]:
    """One line per source, in order of appearance."""
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in errors:
        by_source[row.source][row.cell].append(row.error)
    scores = []
    for source, cells in by_source.items():
        absolute = np.array([np.mean(np.abs(values)) for values in cells.values()])
        signed = np.array([np.mean(values) for values in cells.values()])
        rows = [error for values in cells.values() for error in values]
        scores.append(
            SourceScore(
                source=source,
                rows=len(rows),
                cells=len(cells),
                mean_abs_error=float(absolute.mean()),
                median_abs_error=float(np.median(absolute)),
                bias=float(signed.mean()),
                worst=float(max(rows, key=abs)),
            )
        )
    return scores


def overall_bias(scores: Sequence[SourceScore]) -> float:
    """Mean of the sources' biases, each source with the same weight."""
    return float(np.mean([line.bias for line in scores]))


@dataclass(frozen=True)
class Regret:
    """What choosing by prediction costs: measured time of the predicted best plan over the measured best, minus 1."""

    model: str
    plans: int
    regret: float
    chosen: str
    best: str


def regrets(errors: Sequence[RowError], cases: Sequence[Case]) -> list[Regret]:
    """Per model of a source that measured several plans of one job on as many GPUs."""
    groups: dict[tuple[str, str, int, int], list[RowError]] = defaultdict(list)
    for case, row in zip(cases, errors, strict=True):
        gpus = case.plans[0].gpus
        if case.metric == "iteration_s":
            groups[case.source, f"{case.model.name} on {gpus}", case.global_batch, gpus].append(row)
    found = []
    for (source, model, batch, _), rows in groups.items():
        if len(rows) < 4:
            continue
        chosen, best = min(rows, key=lambda r: r.predicted), min(rows, key=lambda r: r.measured)
        name = f"{source}: {model} GPUs, batch {batch}"
        found.append(Regret(name, len(rows), chosen.measured / best.measured - 1, chosen.label, best.label))
    return found


def as_dicts(items: Sequence[RowError | SourceScore | Regret]) -> list[dict[str, object]]:
    """Plain values for JSON."""
    return [asdict(item) for item in items]
