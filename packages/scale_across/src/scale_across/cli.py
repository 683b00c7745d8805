"""The command line of the Explorer: `scale-across explore`, `compare`, `study`, `predict`, `validate` and `trace`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from common import config
from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.cli_explore import compare, explore_training, reasons, training_dict, training_tables
from scale_across.cli_predict import predict, validate
from scale_across.cli_study import study
from scale_across.cli_trace import trace
from scale_across.estimate import TrainingJob
from scale_across.plan_file import PlanFile
from scale_across.plot_explore import plot_exploration
from scale_across.rl_job import RlJob
from scale_across.rl_search import RlExploration, explore_rl
from scale_across.robust import Box

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Chooses placement and communication of a job over several sites together, and proves how good the choice is."""


@app.command()
def explore(
    cluster_file: Annotated[Path, typer.Argument(help="sites and links; `cluster:` of an experiment's file works too")],
    job_file: Annotated[
        Path, typer.Argument(help="kind: training (docs/explorer.md) or an RL job; `make demo` records one")
    ],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value over the cluster file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the table")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="write the best plan as YAML")] = None,
    time_limit_s: Annotated[float, typer.Option("--time-limit", help="seconds; then the best plan so far")] = 60.0,
    gap: Annotated[float, typer.Option("--gap", help="stop when no plan can be faster by more than this share")] = 0.0,
    robust: Annotated[
        list[str] | None,
        typer.Option("--robust", help="best in the worst case: bandwidth=0.5, latency=2, compute=0.9 (factors)"),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="search production with each dimension freed, too")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the plans' steps: a .png or .svg file")] = None,
) -> None:
    """Find the fastest placement, schedule and network technology for a job and compare it with the baselines.

    Examples:
        scale-across explore cluster.yaml job.yaml --set links.0.bandwidth_gbps=10 --save plan.yaml
        scale-across explore cluster.yaml job.yaml --robust bandwidth=0.5 --robust latency=2 --plot plans.png
    """
    data = config.read_yaml(cluster_file)
    data = config.apply_overrides(data.get("cluster", data), overrides or [])
    cluster = config.validate(ClusterSpec, data, where=str(cluster_file))
    if config.read_yaml(job_file).get("kind") == "training":
        box = config.validate(Box, config.apply_overrides({}, robust), where="--robust") if robust else None
        job = config.load(job_file, TrainingJob)
        trained = explore_training(cluster, job, time_limit_s=time_limit_s, tolerance=gap, box=box, why=why)
        plan = PlanFile.of(trained.best.choice).model_copy(update={"cluster": cluster, "job": job})
        best: dict[str, object] = plan.model_dump(mode="json")
        result, tables, notes = training_dict(trained), training_tables(trained), reasons(trained)
        if plot:
            plot_exploration(trained, plot)
    else:
        found = explore_rl(cluster, config.load(job_file, RlJob), time_limit_s=time_limit_s)
        best, result, tables, notes = found.best.to_dict(), _to_dict(found), [exploration_table(found)], []
    if save:
        _save(save, yaml.safe_dump(best, sort_keys=False))
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for table in tables:
        Console().print(table)
    for note in notes:
        Console().print(f"explorer wins {note}")


app.command()(compare)
app.command()(study)
app.command()(predict)
app.command()(validate)
app.command()(trace)


def _save(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text)
        aside.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--save {path}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None


def exploration_table(found: RlExploration) -> Table:
    """The winner beside the baselines, with predicted seconds."""
    proof = "proven optimal" if found.gap == 0 else f"gap {found.gap:.1%}"
    title = f"Explorer: {found.plans_priced} plans priced, {found.branches_pruned} branches pruned, {proof}"
    table = Table(title=title, title_justify="left")
    for column in ("plan", "where and how", "compute s", "network s", "step s", "speedup"):
        table.add_column(column, justify="left" if column in ("plan", "where and how") else "right", overflow="fold")
    for plan in (*found.baselines, found.best):
        step = plan.step
        table.add_row(
            plan.name,
            plan.describe(),
            f"{step.total_s - step.network_s:.2f}",
            f"{step.network_s:.2f}",
            f"{step.total_s:.2f}",
            f"{found.baselines[0].step.total_s / step.total_s - 1:+.1%}",
        )
    return table


def _to_dict(found: RlExploration) -> dict[str, object]:
    return {
        "best": found.best.to_dict(),
        "baselines": [plan.to_dict() for plan in found.baselines],
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "speedup_over": {plan.name: found.speedup_over(plan) for plan in found.baselines},
        "plans_priced": found.plans_priced,
        "branches_pruned": found.branches_pruned,
        "runtime_s": found.runtime_s,
    }


def main() -> None:
    """Entry point; a ConfigError becomes one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
