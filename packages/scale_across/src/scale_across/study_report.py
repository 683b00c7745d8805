"""What a study says: distributions of speedups, for the joint search and for each dimension alone and in pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scale_across.study import FREED, PRODUCTION, PUBLISHED

COLOURS = ("#4878a8", "#e2a458", "#7f9f5f", "#c0504d", "#8064a2", "#4bacc6", "#222222")


@dataclass(frozen=True)
class Spread:
    """Speedups T_slow / T_fast - 1 over the design points at which both have a plan."""

    name: str
    points: int
    largest: float
    p95: float
    median: float
    above_ten_percent: float
    """Share of the points."""

    @classmethod
    def of(cls, name: str, speedups: Sequence[float]) -> Spread:
        """From at least one speedup."""
        ordered = sorted(speedups)
        return cls(
            name,
            len(ordered),
            ordered[-1],
            ordered[math.ceil(0.95 * len(ordered)) - 1],
            statistics.median(ordered),
            sum(speedup > 0.1 for speedup in ordered) / len(ordered),
        )


def speedups(rows: Iterable[dict[str, Any]], over: Sequence[str], by: str = "explorer") -> list[float]:
    """Of `by` over the best of `over`, where there is one."""
    found = []
    for row in rows:
        slow = [float(row[name]) for name in over if row[name]]
        if row[by] and slow:
            found.append(min(slow) / float(row[by]) - 1)
    return found


def spreads(rows: list[dict[str, Any]]) -> list[Spread]:
    """The joint search over production and over the best published; production with dimensions freed; each method."""
    wanted = [
        ("explorer over production", (PRODUCTION,), "explorer"),
        ("explorer over best published", PUBLISHED, "explorer"),
        *((f"{rules.name} over production", (PRODUCTION,), rules.name) for rules in FREED),
        *((f"explorer over {name}", (name,), "explorer") for name in PUBLISHED),
    ]
    made = [(name, speedups(rows, over, by)) for name, over, by in wanted]
    return [Spread.of(name, values) for name, values in made if values]


def spread_table(rows: list[dict[str, Any]]) -> Table:
    """One line per comparison."""
    solved = [row for row in rows if row["explorer"]]
    proven = sum(float(row["gap"]) <= 0.03 for row in solved)
    table = Table(
        title=f"{len(rows)} design points, {len(solved)} with a plan that fits; "
        f"{proven} searched to within 3 % of the proven bound",
        title_justify="left",
    )
    for column in ("speedup", "points", "max", "95th percentile", "median", "above 10 %"):
        table.add_column(column, justify="left" if column == "speedup" else "right")
    for one in spreads(rows):
        table.add_row(
            one.name, str(one.points), f"{one.largest:.1%}", f"{one.p95:.1%}", f"{one.median:.1%}",
            f"{one.above_ten_percent:.0%}",
        )  # fmt: skip
    return table


def plot_study(rows: list[dict[str, Any]], path: Path) -> None:
    """Cumulative distributions: the joint search on the left, dimensions alone and in pairs on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    joint = [("over production", (PRODUCTION,)), ("over the best published", PUBLISHED)]
    for colour, (label, over) in zip(COLOURS, joint, strict=False):
        _cumulative(left, speedups(rows, over), label, colour)
    for colour, rules in zip(COLOURS, FREED, strict=False):
        label = rules.name.removeprefix(f"{PRODUCTION} + ")
        _cumulative(right, speedups(rows, (PRODUCTION,), rules.name), label, colour)
    _cumulative(right, speedups(rows, (PRODUCTION,)), "all three", "black")
    for axes, title in ((left, "the joint search"), (right, "production with some dimensions freed")):
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(0, None)
        axes.set_xticks([0, 0.05, 0.1, 0.5, 1, 5, 10], ["0", "5%", "10%", "50%", "100%", "500%", "1000%"], fontsize=8)
        axes.set_xlabel(f"speedup, {title}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    left.set_ylabel("share of design points")
    aside = path.with_name(f".{path.stem}.tmp{path.suffix}")
    figure.savefig(aside, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    aside.replace(path)


def _cumulative(axes: Any, values: list[float], label: str, colour: str) -> None:
    ordered = sorted(max(value, 0.0) for value in values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(ordered, shares, where="post", label=label, color=colour, linewidth=1.2)
