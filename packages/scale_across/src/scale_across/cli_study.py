"""The command `scale-across study`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common import config
from scale_across.study import Study, run_study
from scale_across.study_report import plot_study, spread_table


def study(
    study_file: Annotated[
        Path, typer.Argument(help="values to draw design points from; experiments/configs/study.yaml")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV, one row per point; an existing one is resumed")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value over the study file")] = None,
    workers: Annotated[int, typer.Option("--workers", help="processes; 0: one per core")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the distributions: a .png or .svg file")] = None,
) -> None:
    """Search many design points and show how much each dimension wins, alone and together.

    Example: scale-across study experiments/configs/study.yaml -o study.csv --set points=20 --plot study.svg
    """
    chosen = config.validate(
        Study, config.apply_overrides(config.read_yaml(study_file), overrides or []), where=str(study_file)
    )
    columns = (
        TextColumn("design points"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("points", total=chosen.points)
        rows = run_study(
            chosen, output, workers or len(os.sched_getaffinity(0)),
            lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    Console().print(spread_table(rows))
    if plot:
        plot_study(rows, plot)
