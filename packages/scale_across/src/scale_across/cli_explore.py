"""The command `scale-across explore` for a training job."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.spec import ClusterSpec
from scale_across.estimate import TrainingJob
from scale_across.explore import Exploration, explore
from scale_across.model_presets import load_model
from scale_across.topology import Topology


def explore_training(cluster: ClusterSpec, job: TrainingJob, time_limit_s: float) -> Exploration:
    """Search with a progress line on stderr; Ctrl-C ends it with the best plan so far."""
    model, topology = load_model(job.model), Topology.from_cluster(cluster)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling the estimate (first use only) and bounding")

        def show(kind: str, best_s: float, bound_s: float) -> None:
            progress.update(task, description=f"{kind}: best {best_s:.3f} s, bound {bound_s:.3f} s")

        return explore(model, topology, job, time_limit_s=time_limit_s, progress=show)


def training_table(found: Exploration) -> Table:
    """The winner under the baselines, with predicted seconds."""
    proof = "optimal over the space in this model" if found.gap == 0 else f"gap to the lower bound {found.gap:.1%}"
    pruned = ", ".join(f"{count} by {rule}" for rule, count in found.pruned.items())
    missing = f"; no plan for {', '.join(found.missing)}" if found.missing else ""
    table = Table(
        title=f"Explorer: {proof}; {found.priced} plans priced, pruned {pruned}{missing}; {found.runtime_s:.1f} s",
        title_justify="left",
    )
    for column in ("plan", "where and how", "GiB", "compute s", "exposed s", "step s", "explorer faster by"):
        table.add_column(column, justify="left" if column in ("plan", "where and how") else "right", overflow="fold")
    for plan in (*found.baselines, found.best):
        table.add_row(
            plan.name,
            plan.describe(),
            f"{plan.estimate.memory_bytes / 2**30:.1f}",
            f"{plan.estimate.compute_s:.3f}",
            f"{plan.step_s - plan.estimate.compute_s - plan.estimate.optimizer_s:.3f}",
            f"{plan.step_s:.3f}",
            f"{found.speedup_over(plan):+.1%}",
        )
    return table


def training_dict(found: Exploration) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "best": found.best.to_dict(),
        "baselines": [plan.to_dict() for plan in found.baselines],
        "missing": list(found.missing),
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "speedup_over": {plan.name: found.speedup_over(plan) for plan in found.baselines},
        "plans_priced": found.priced,
        "plans_pruned": found.pruned,
        "runtime_s": found.runtime_s,
    }
