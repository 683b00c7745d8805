"""Fit the A100's efficiencies and the 2021-22 stacks' overheads; show what a fit on half the sources says of the rest.

Seven constants, each of a mechanism; no constant belongs to a model or a row. The objective is the mean over sources of
the mean absolute error, plus 0.3 of the absolute bias of each. Nelder-Mead from textbook values, deterministic.

    python experiments/calibrate.py --evaluations 700 --output experiments/results/calibration.json      (two minutes)
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import Progress
from scipy.optimize import minimize

from scale_across.estimate import COLUMNS, Setup
from scale_across.measurements import Case, read_cases
from scale_across.validate import setup_of

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
NAMES = (
    "gemm_fraction",
    "gemm_k0",
    "kernel_gap_us",
    "memory_fraction",
    "unaligned_fraction",
    "dispatch_us",
    "collective_us",
)
START = (0.85, 64.0, 5.0, 0.80, 0.33, 40.0, 40.0)
LOW = (0.5, 0.0, 0.0, 0.4, 0.1, 5.0, 0.0)
HIGH = (1.0, 400.0, 15.0, 1.0, 1.0, 120.0, 300.0)
SOURCES = ("sc21_table1", "korthikanti_table5", "vtrain_multi_node", "vtrain_single_node")
HALVES = {
    "all four": SOURCES,
    "SC21 and vTrain single-node": (SOURCES[0], SOURCES[3]),
    "Korthikanti and vTrain multi-node": (SOURCES[1], SOURCES[2]),
    "SC21 and Korthikanti": (SOURCES[0], SOURCES[1]),
    "vTrain": (SOURCES[2], SOURCES[3]),
}


@dataclass(frozen=True)
class Run:
    """A case ready to be estimated again and again."""

    case: Case
    setup: Setup
    plans_NF: npt.NDArray[np.int64]

    def error(self, constants: npt.NDArray[np.float64]) -> float:
        """Predicted over measured step time, minus 1."""
        values = dict(zip(NAMES, constants, strict=True))
        gpu = self.setup.gpu._replace(
            gemm_fraction=values["gemm_fraction"],
            gemm_k0=values["gemm_k0"],
            gap_s=values["kernel_gap_us"] * 1e-6,
            memory_fraction=values["memory_fraction"],
            unaligned_fraction=values["unaligned_fraction"],
        )
        stack = self.setup.stack._replace(
            dispatch_s=values["dispatch_us"] * 1e-6, collective_s=values["collective_us"] * 1e-6
        )
        rows_NF = replace(self.setup, gpu=gpu, stack=stack).estimate_batch(self.plans_NF)
        return float(rows_NF[:, COLUMNS.index("total_s")].min() / self.case.measured - 1)


def scores(runs: list[Run], constants: npt.NDArray[np.float64]) -> dict[str, tuple[float, float]]:
    """Source → (mean absolute error, bias), rows of one cell averaged first."""
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        cells[run.case.source][run.case.cell].append(run.error(constants))
    return {
        source: (
            float(np.mean([np.mean(np.abs(errors)) for errors in found.values()])),
            float(np.mean([np.mean(errors) for errors in found.values()])),
        )
        for source, found in cells.items()
    }


def fit(runs: list[Run], evaluations: int) -> npt.NDArray[np.float64]:
    """The constants of the least objective."""

    def objective(x: npt.NDArray[np.float64]) -> float:
        if (x < LOW).any() or (x > HIGH).any():
            return 10.0
        found = scores(runs, x).values()
        return sum(error + 0.3 * abs(bias) for error, bias in found) / len(found)

    start = np.array(START)
    steps = np.where(start * 1.2 < HIGH, 1.2, 0.8)
    simplex = np.vstack(
        [start] + [np.where(np.arange(len(start)) == i, start * steps, start) for i in range(len(start))]
    )
    found = minimize(
        objective, start, method="Nelder-Mead", options={"maxfev": evaluations, "initial_simplex": simplex}
    )
    return np.asarray(found.x)


def main(
    output: Annotated[Path, typer.Option(help="JSON with constants and errors")],
    evaluations: Annotated[int, typer.Option(help="objective evaluations per fit")] = 400,
) -> None:
    """Fit on all sources and on halves; print the errors on the sources that a fit did not see."""
    names = ("measured_training", "vtrain_multi_node", "vtrain_single_node")
    cases = [case for name in names for case in read_cases(DATA / f"{name}.csv") if case.source in SOURCES]
    runs = [Run(case, setup_of(case), np.array(case.plans, np.int64)) for case in cases]
    result = {}
    with Progress() as progress:
        for label, sources in progress.track(HALVES.items(), description="fits"):
            constants = fit([run for run in runs if run.case.source in sources], evaluations)
            found = scores(runs, constants)
            result[label] = {
                "constants": dict(zip(NAMES, constants.round(4).tolist(), strict=True)),
                "errors": {
                    source: {"seen": source in sources, "mean_abs_error": round(error, 4), "bias": round(bias, 4)}
                    for source, (error, bias) in found.items()
                },
            }
            errors = ", ".join(
                f"{source} {error:.1%}{'' if source in sources else ' (unseen)'}"
                for source, (error, _) in found.items()
            )
            progress.console.print(f"fitted to {label}: {errors}")
    aside = output.with_suffix(".tmp")
    output.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(json.dumps(result, indent=1) + "\n")
    aside.replace(output)


if __name__ == "__main__":
    typer.run(main)
