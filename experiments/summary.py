"""The tables that the main job prints."""

from __future__ import annotations

from rich.table import Table

from evaluation import OPPONENTS, Evaluation
from scale_across.rl_search import RlExploration
from strat_reasoner.evaluate import Interval


def plans_table(found: RlExploration, predicted: dict[str, float], measured: dict[str, float]) -> Table:
    """Predicted and measured step times and speedups."""
    table = Table(title="Plans: seconds a step", title_justify="left")
    for column in ("placement", "predicted", "measured", "error", "speedup predicted", "speedup measured"):
        table.add_column(column, justify="right" if column != "placement" else "left")
    for name in ("production", "chosen"):
        table.add_row(
            name,
            f"{predicted[name]:.2f}",
            f"{measured[name]:.2f}",
            f"{predicted[name] / measured[name] - 1:+.1%}",
            f"{predicted['production'] / predicted[name] - 1:+.1%}",
            f"{measured['production'] / measured[name] - 1:+.1%}",
        )
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
