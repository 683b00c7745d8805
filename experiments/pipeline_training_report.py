"""What `schedule_testbed.py` leaves: the table and its floors, the figure, the CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline_training_predict import spearman

ERROR_FLOOR, RANK_FLOOR, PICK_FLOOR = 0.12, 0.9, 0.05
DISTURBED = 0.25
"""Cores in use by other programs, from which on a run that is not paced says more about them."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Fidelity:
    """How well runs were predicted."""

    runs: int
    mean_error: float
    bias: float
    rank_correlation: float
    picks: dict[str, float]
    """Per cluster: how much slower the predicted best is than the measured best."""


def fidelity(rows: Sequence[Row]) -> Fidelity:
    """Over rows of equal kind (all paced, or none)."""
    predicted = np.array([float(row["predicted_s"]) for row in rows])
    measured = np.array([float(row["measured_s"]) for row in rows])
    errors = predicted / measured - 1
    picks = {}
    for cluster in dict.fromkeys(str(row["cluster"]) for row in rows):
        here = np.array([str(row["cluster"]) == cluster for row in rows])
        picks[cluster] = float(measured[here][np.argmin(predicted[here])] / measured[here].min() - 1)
    return Fidelity(
        len(rows), float(np.abs(errors).mean()), float(errors.mean()), spearman(predicted.tolist(), measured.tolist()),
        picks,
    )  # fmt: skip


def report(rows: Sequence[Row], console: Console) -> None:
    """The table, and the floors with what falls short."""
    table = Table(title="Seconds per step", title_justify="left")
    for column in ("cluster", "placement", "schedule", "predicted", "measured", "error", "overruns", "others"):
        table.add_column(column)
    for row in rows:
        error = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        table.add_row(
            str(row["cluster"]), str(row["placement"]), str(row["schedule"]), f"{float(row['predicted_s']):.3f}",
            f"{float(row['measured_s']):.3f}", f"{error:+.1%}", f"{float(row['overruns']):.1%}",
            f"{float(row['others']):.1f}",
        )  # fmt: skip
    console.print(table)
    console.print("overruns: blocks that took longer than their pace; others: cores that other programs used meanwhile")
    free = [row for row in rows if str(row["paced"]) == "False"]
    for name, part in (
        ("paced", [row for row in rows if str(row["paced"]) == "True"]),
        ("as fast as the machine goes", free),
        (f"of these with less than {DISTURBED} cores for others", [r for r in free if float(r["others"]) < DISTURBED]),
    ):
        if len(part) < 2:
            continue
        found = fidelity(part)
        console.print(f"{name}: {found.runs} runs, bias {found.bias:+.1%}")
        worst = max(found.picks.values())
        near = sum(slower <= PICK_FLOOR for slower in found.picks.values())
        for text, good in (
            (f"mean absolute error {found.mean_error:.1%} (floor 12 %)", found.mean_error <= ERROR_FLOOR),
            (f"rank correlation {found.rank_correlation:.3f} (floor 0.9)", found.rank_correlation >= RANK_FLOOR),
            (
                f"predicted best within 5 % of the measured best in {near} of {len(found.picks)} clusters "
                f"(worst {worst:.1%})",
                worst <= PICK_FLOOR,
            ),
        ):
            console.print(f"  {'met  ' if good else 'SHORT'} {text}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured, one mark per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    matplotlib.rcParams["svg.hashsalt"] = "testbed"
    figure, axes = plt.subplots(figsize=(5.5, 5))
    for index, name in enumerate(dict.fromkeys(str(row["placement"]) for row in rows)):
        part = [row for row in rows if row["placement"] == name]
        disturbed = [str(row["paced"]) == "False" and float(row["others"]) >= DISTURBED for row in part]
        for hollow in sorted({*disturbed}):
            shown = [row for row, bad in zip(part, disturbed, strict=True) if bad == hollow]
            axes.plot(
                [float(row["predicted_s"]) for row in shown], [float(row["measured_s"]) for row in shown],
                "osD^vP"[index % 6], color=f"C{index}", fillstyle="none" if hollow else "full", alpha=0.75,
                label=f"{name}, other programs at work" if hollow else name,
            )  # fmt: skip
    everything = [float(row[key]) for row in rows for key in ("predicted_s", "measured_s")]
    ends = np.array([0.9 * min(everything), 1.1 * max(everything)])
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(ends, 0.88 * ends, 1.12 * ends, color="k", alpha=0.08, linewidth=0)
    axes.set(
        xscale="log", yscale="log", xlabel="predicted s per step", ylabel="measured s per step", xlim=ends, ylim=ends
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def read_rows(path: Path, fingerprint: str) -> list[Row]:
    """Rows of an earlier run with the same settings."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("settings") == fingerprint]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Aside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".csv.tmp")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    aside.replace(path)
