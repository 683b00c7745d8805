"""The commands `scale-across explore` for a training job, and `scale-across compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from common import config
from common.spec import ClusterSpec
from scale_across.baselines import BASELINES, DIMENSIONS, freed
from scale_across.estimate import TrainingJob
from scale_across.explore import Exploration, SitePlan, explore
from scale_across.judge import Judged
from scale_across.model_presets import load_model
from scale_across.plan_file import PlanFile, to_dict
from scale_across.robust import Box, derated, losses, slowed
from scale_across.topology import Topology


def explore_training(
    cluster: ClusterSpec, job: TrainingJob, *, time_limit_s: float, tolerance: float, box: Box | None, why: bool
) -> Exploration:
    """Search with a progress line on stderr; Ctrl-C ends it with the best plan so far.

    With a box the search is for the plan that is best in its worst corner.
    """
    if box is not None:
        cluster, job = derated(cluster, box), slowed(job, box)
    model, topology = load_model(job.model), Topology.from_cluster(cluster)
    rules = BASELINES
    if why:
        rules += tuple(freed(one, name) for one in BASELINES[:1] for name in DIMENSIONS)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling the bounds (first use only)")

        def show(kind: str, best_s: float, bound_s: float) -> None:
            gap = f", gap {best_s / bound_s - 1:.1%}" if best_s < float("inf") else ""
            progress.update(task, description=f"{kind}: best {best_s:.3f} s, bound {bound_s:.3f} s{gap}")

        return explore(model, topology, job, time_limit_s=time_limit_s, tolerance=tolerance, rules=rules, progress=show)


def training_tables(found: Exploration) -> list[Table]:
    """The winner under the baselines; then runners-up and the robustness of the winner."""
    proof = "optimal over the space in this model" if found.gap == 0 else f"gap to the lower bound {found.gap:.1%}"
    pruned = ", ".join(f"{count} by {rule}" for rule, count in found.pruned.items())
    missing = f"; no plan for {', '.join(found.missing)}" if found.missing else ""
    title = (
        f"Explorer: {proof}; {found.bounded} rows bounded, {len(found.simulated)} plans simulated, "
        f"pruned {pruned}{missing}; {found.runtime_s:.1f} s"
    )
    table = _plan_table(title, "explorer faster by")
    for plan in (*found.baselines, found.best):
        _add(table, plan.name, plan.judged, f"{found.speedup_over(plan):+.1%}")
    others = _plan_table("Runners-up of other kinds, and plans that cost less in some way", "slower by")
    for one in found.runners_up():
        _add(others, "runner-up", one, f"{one.step_s / found.best.step_s - 1:+.1%}")
    for one in found.pareto()[1:6]:
        _add(others, "pareto", one, f"{one.step_s / found.best.step_s - 1:+.1%}")
    return [table, *([others] if others.row_count else []), robustness_table(found.best.judged)]


def robustness_table(judged: Judged) -> Table:
    """The winner's step when something is off."""
    table = Table(title="The same plan when the cluster is worse than believed", title_justify="left")
    for column in ("off", "by", "step s", "slower by"):
        table.add_column(column, justify="left" if column == "off" else "right")
    for loss in losses(judged):
        table.add_row(loss.name, f"{loss.error:.0%}", f"{loss.step_s:.3f}", f"{loss.slower:+.1%}")
    return table


def reasons(found: Exploration) -> list[str]:
    """For every baseline the part of the step in which the winner gains most, in words and numbers."""
    return [reason(plan, found.best) for plan in found.baselines if plan.step_s > found.best.step_s]


def reason(slow: SitePlan, fast: SitePlan) -> str:
    """One sentence."""
    a, b = slow.judged.parts, fast.judged.parts
    words = {
        "compute_s": "computes less on its busiest stage",
        "gather_s": "waits less for parameters",
        "idle_s": "idles less in the pipeline",
        "reduce_s": "exposes less of the gradient reduction",
        "optimizer_s": "spends less on the optimizer",
    }
    gains = {name: float(a[name] - b[name]) for name in words}
    most = max(gains, key=lambda name: gains[name])
    total = slow.step_s - fast.step_s
    changed = [
        f"{what} {before} -> {after}"
        for what, before, after in (
            ("crossing axis", slow.choice.region.crossing, fast.choice.region.crossing),
            ("sites", "+".join(slow.choice.sites), "+".join(fast.choice.sites)),
            ("schedule", slow.choice.schedule, fast.choice.schedule),
            ("technology", slow.choice.technology or "none", fast.choice.technology or "none"),
            *(
                (name, getattr(slow.choice.parallelism, name), getattr(fast.choice.parallelism, name))
                for name in ("tp", "cp", "ep", "pp", "dp", "chunks", "microbatch", "zero", "recompute", "reduction")
            ),
        )
        if before != after
    ]
    return (
        f"over {slow.name} ({total:+.3f} s): {words[most]} ({gains[most]:.3f} s of it); "
        f"{', '.join(changed) or 'nothing differs'}"
    )


def training_dict(found: Exploration) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "best": to_dict("explorer", found.best.judged),
        "baselines": [to_dict(plan.name, plan.judged) for plan in found.baselines],
        "missing": list(found.missing),
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "baseline_gaps": found.baseline_gaps,
        "speedup_over": {plan.name: found.speedup_over(plan) for plan in found.baselines},
        "why": reasons(found),
        "runners_up": [to_dict("runner-up", one) for one in found.runners_up()],
        "pareto": [to_dict("pareto", one) for one in found.pareto()],
        "rows_bounded": found.bounded,
        "rows_pruned": found.pruned,
        "plans_simulated": len(found.simulated),
        "runtime_s": found.runtime_s,
    }


def compare(
    plans: Annotated[list[Path], typer.Argument(help="plans as `explore --save` writes them, two or more")],
    cluster: Annotated[Path | None, typer.Option("--cluster", help="simulate all on this cluster instead")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the table")] = False,
) -> None:
    """Simulate plans again and show what each spends its step on.

    Example: scale-across compare plan_a.yaml plan_b.yaml
    """
    judged = {}
    for path in plans:
        plan = config.load(path, PlanFile)
        if cluster is not None:
            data = config.read_yaml(cluster)
            spec = config.validate(ClusterSpec, data.get("cluster", data), where=str(cluster))
            plan = plan.model_copy(update={"cluster": spec})
        judged[str(path)] = plan.judged()
    if as_json:
        print(json.dumps({name: to_dict(name, one) for name, one in judged.items()}, indent=1))
        return
    fastest = min(one.step_s for one in judged.values())
    table = _plan_table("Simulated again", "slower by")
    for name, one in judged.items():
        _add(table, name, one, f"{one.step_s / fastest - 1:+.1%}")
    console = Console()
    console.print(table)
    first, *others = judged.items()
    for name, one in others:
        slow, fast = (first, (name, one)) if first[1].step_s > one.step_s else ((name, one), first)
        if slow[1].step_s > fast[1].step_s:
            console.print(f"{fast[0]} wins " + reason(SitePlan(slow[0], slow[1]), SitePlan(fast[0], fast[1])))


def _plan_table(title: str, last: str) -> Table:
    table = Table(title=title, title_justify="left")
    left = ("plan", "where and how")
    for column in (*left, "GiB", "compute s", "idle s", "exposed s", "cross-site GiB", "step s", last):
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _add(table: Table, name: str, judged: Judged, last: str) -> None:
    parts = judged.parts
    table.add_row(
        name,
        judged.choice.describe(),
        f"{judged.memory_bytes / 2**30:.1f}",
        f"{parts['compute_s']:.3f}",
        f"{parts['idle_s']:.3f}",
        f"{parts['gather_s'] + parts['reduce_s']:.3f}",
        f"{judged.cross_site_bytes / 2**30:.1f}",
        f"{judged.step_s:.3f}",
        last,
    )
