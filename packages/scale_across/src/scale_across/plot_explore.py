"""The steps of the plans that a search found, as bars: what each spends its time on."""

from __future__ import annotations

from pathlib import Path

from common.config import ConfigError
from scale_across.explore import Exploration

PARTS = {
    "compute_s": ("compute", "#4878a8"),
    "idle_s": ("pipeline idle", "#c9c9c9"),
    "gather_s": ("waiting for parameters", "#e2a458"),
    "reduce_s": ("exposed reduction", "#c0504d"),
    "optimizer_s": ("optimizer", "#7f9f5f"),
}


def plot_exploration(found: Exploration, path: Path) -> None:
    """Draw baselines and winner with the proven bound.

    Raises:
        ConfigError: a file type that cannot be drawn.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            f"--plot {path}: cannot draw {path.suffix or 'a file without ending'}; use .png, .svg or .pdf"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plans = [*found.baselines, found.best]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(plans) + 1.6), layout="constrained")
    for row, plan in enumerate(plans):
        left = 0.0
        for key, (label, colour) in PARTS.items():
            width = float(plan.judged.parts[key])
            axes.barh(row, width, left=left, color=colour, label=label if row == 0 else None)
            left += width
        axes.text(left, row, f" {plan.step_s:.3f} s ({found.speedup_over(plan):+.1%})", va="center", fontsize=8)
    axes.axvline(found.lower_bound_s, color="black", linestyle=":", linewidth=1, label="proven lower bound")
    axes.set_yticks(range(len(plans)), [plan.name for plan in plans])
    axes.set_xlim(0, max(plan.step_s for plan in plans) * 1.25)
    axes.set_xlabel("seconds per step (event simulation)")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3, frameon=False)
    aside = path.with_name(f".{path.stem}.tmp{path.suffix}")
    figure.savefig(aside, bbox_inches="tight", dpi=150)
    plt.close(figure)
    aside.replace(path)
