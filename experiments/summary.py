"""The tables that the main job prints."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.table import Table

from evaluation import OPPONENTS, Evaluation
from strat_reasoner.evaluate import Interval
from strat_reasoner.train import StepRecord

KINDS = ("predicted", "measured")


@dataclass(frozen=True)
class Measured:
    """Steps under one placement, links off and on by turns: `off[i]` and `on[i]` are neighbours."""

    off: tuple[StepRecord, ...]
    on: tuple[StepRecord, ...]

    @property
    def step_s(self) -> float:
        """Median step with links."""
        return statistics.median(record.total_s for record in self.on)

    @property
    def compute_s(self) -> float:
        """Median step without links."""
        return statistics.median(record.total_s for record in self.off)

    @property
    def network_s(self) -> float:
        """Median of what the links add between neighbours; a drift of the host cancels in it."""
        return max(0.0, statistics.median(on.total_s - off.total_s for on, off in zip(self.on, self.off, strict=True)))


def plans_table(m: dict[str, float]) -> Table:
    """Predicted and measured step times and speedups from the headline metrics.

    The measured speedup compares what the links add under each placement on top of one compute time, the median of
    all steps without links: the placements run minutes apart, and other work on the host must not count as speedup.
    """
    table = Table(title="Plans: seconds a step (links add)", title_justify="left")
    for column in ("placement", "predicted", "measured", "speedup predicted", "speedup measured"):
        table.add_column(column, justify="right" if column != "placement" else "left")
    for name in ("production", "chosen"):
        step = {kind: f"{m[f'step_s/{name}/{kind}']:.2f} ({m[f'network_s/{name}/{kind}']:.2f})" for kind in KINDS}
        speedups = [f"{m[f'speedup/{kind}']:+.1%}" if name == "chosen" else "" for kind in KINDS]
        table.add_row(name, step["predicted"], step["measured"], *speedups)
    return table


def games_table(before: Evaluation, after: Evaluation, change: dict[str, Interval]) -> Table:
    """Before, after and gain; brackets are 95 % intervals."""
    table = Table(title=f"{before.game}: before and after training, [95 % intervals]", title_justify="left")
    for column in ("measure", "before", "after", "gain"):
        table.add_column(column)
    table.add_row(
        "exploitability (exact, from the table)",
        str(before.exploitability),
        str(after.exploitability),
        f"fell by {change['exploitability_fall']}",
    )
    table.add_row(
        "value against the equilibrium (exact)",
        str(before.equilibrium_value),
        str(after.equilibrium_value),
        str(change["equilibrium_value"]),
    )
    for opponent in OPPONENTS:
        for seat in (0, 1):
            table.add_row(
                f"return against {opponent}, seat {seat}",
                str(before.mean_return(opponent, seat)),
                str(after.mean_return(opponent, seat)),
                "",
            )
            table.add_row(
                f"win rate against {opponent}, seat {seat}",
                _percent(before.matches[opponent, seat].win_rate),
                _percent(after.matches[opponent, seat].win_rate),
                "",
            )
    table.add_row("illegal answers", f"{before.table.illegal_rate:.1%}", f"{after.table.illegal_rate:.1%}", "")
    return table


def _percent(rate: Interval) -> str:
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"
