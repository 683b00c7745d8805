"""How far is the closed form from the event simulation? Random candidates over models, clusters and plans.

    .venv/bin/python experiments/closed_form_check.py [--candidates 2000] [--seed 0] [--csv FILE]

Prints the median and the 95th percentile of |closed form - simulation| / simulation, and for the candidates that differ
by more than 10 % which part of the step differs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from rich.progress import track

from common.config import ConfigError
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism, describe
from scale_across.simulate import simulate
from scale_across.simulate_input import candidate
from scale_across.step import Estimate
from scale_across.topology import Topology

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "nemotron-4-340b", "mixtral-8x22b", "deepseek-v3")
CLUSTERS = ("llama3-24k", "meta-region", "cloud-regions", "crosspipe-cross-campus")
STACKS = ("megatron-2024", "meta-2024")
LIMITS = (0.01, 0.03, 0.10)


def draw(rng: np.random.Generator, setup: Setup, gpus: int) -> Parallelism | None:
    """One random plan that divides its job and fits into memory; None when this draw does not."""
    pick = lambda *values: int(rng.choice(values))  # noqa: E731
    moe = any(kind[10] > 0 for kind in setup.kinds_KF)
    tp, pp, cp = pick(1, 2, 4, 8), pick(1, 2, 4, 8, 16, 32), pick(1, 1, 1, 2, 4)
    dp = pick(1, 2, 4, 8, 16, 32, 64, 128)
    plan = Parallelism(
        tp=tp, cp=cp, pp=pp, dp=dp, ep=pick(1, 2, 4, 8) if moe else 1, chunks=pick(1, 1, 2, 4, 8) if pp > 1 else 1,
        microbatch=pick(1, 1, 2, 4), zero=pick(0, 1, 1, 2, 3) if pp == 1 else pick(0, 1, 1, 2), shard=0,
        recompute=pick(0, 0, 1, 2), sp=int(tp > 1), order=pick(0, 1), reduction=pick(0, 1),
    )  # fmt: skip
    try:
        setup.check(plan, gpus)
    except ConfigError:
        return None
    return plan if setup.estimate(plan).memory_bytes <= setup.gpu.memory_bytes else None


def differing_part(closed: Estimate, parts: dict[str, float]) -> str:
    """Which part of the step explains most of the difference."""
    pipeline = closed.bubble_s + closed.pp_s - parts["idle_s"]
    reduction = closed.dp_s - parts["reduce_s"] - parts["gather_s"]
    busy = closed.total_s - closed.bubble_s - closed.pp_s - closed.dp_s - closed.optimizer_s - parts["compute_s"]
    found = {"pipeline (fill and messages)": pipeline, "data-parallel traffic": reduction, "block durations": busy}
    name = max(found, key=lambda key: abs(found[key]))
    return f"{name}: closed form {'higher' if found[name] > 0 else 'lower'}"


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--candidates", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    models = {name: load_model(name) for name in MODELS}
    clusters = {name: Topology.load(name) for name in CLUSTERS}
    setups: dict[tuple[str, ...], Setup] = {}
    rows: list[tuple[str, str, str, float, float, str]] = []
    for _ in track(range(arguments.candidates), description="simulating", disable=not sys.stderr.isatty()):
        while True:
            model, cluster, stack = (str(rng.choice(names)) for names in (MODELS, CLUSTERS, STACKS))
            batch = int(rng.choice((256, 512, 1024, 2048)))
            key = (model, cluster, stack, str(batch))
            if key not in setups:
                job = TrainingJob(model=model, global_batch=batch, seq_len=4096, stack=stack)
                setups[key] = Setup.of(models[model], clusters[cluster], job)
            plan = draw(rng, setups[key], clusters[cluster].spec.gpus)
            if plan:
                break
        closed = setups[key].estimate(plan)
        timeline = simulate(*candidate(setups[key], plan))
        part = differing_part(closed, timeline.parts())
        rows.append((model, cluster, describe(plan), closed.total_s, timeline.step_s, part))
    report(rows)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("model", "cluster", "plan", "closed_form_s", "simulated_s", "largest_difference"))
            writer.writerows((*row[:3], f"{row[3]:.6g}", f"{row[4]:.6g}", row[5]) for row in rows)


def report(rows: list[tuple[str, str, str, float, float, str]]) -> None:
    """Print the distribution, and the causes of what lies beyond 10 %."""
    closed_N, simulated_N = (np.array([row[i] for row in rows], float) for i in (3, 4))
    error_N = closed_N / simulated_N - 1
    away_N = np.abs(error_N)
    print(f"candidates: {len(rows)}")
    print(f"median_difference: {100 * np.median(away_N):.2f} %")
    print(f"p95_difference: {100 * np.percentile(away_N, 95):.2f} %")
    print(f"mean_signed_difference: {100 * error_N.mean():+.2f} %")
    for limit in LIMITS:
        print(f"within_{100 * limit:.0f}_percent: {100 * np.mean(away_N <= limit):.1f} %")
    causes = Counter(row[5] for row, away in zip(rows, away_N, strict=True) if away > 0.10)
    for cause, count in causes.most_common():
        print(f"beyond 10 %: {count} x {cause}")
    for i in np.argsort(-away_N)[:5]:
        print(f"worst: {100 * error_N[i]:+.1f} % {rows[i][0]} on {rows[i][1]}: {rows[i][2]}")


if __name__ == "__main__":
    main()
