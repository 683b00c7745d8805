"""Many design points at once: how much the joint search wins over each baseline, and each dimension alone.

A study file lists values for models, sites, accelerators, links and jobs; points are drawn from their product with a
seed. Every point is searched by the Explorer, by every baseline, and by production with one or two of the three
dimensions freed. Rows are written after each point, so that a stopped study goes on where it stopped.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pydantic import Field

from common.config import Config, ConfigError
from common.spec import ClusterSpec, Link, Site, TierSpec
from scale_across import space_kernel
from scale_across.baselines import BASELINES, DIMENSIONS, Rules, freed
from scale_across.estimate import TrainingJob
from scale_across.explore import Exploration, explore
from scale_across.hardware import accelerator
from scale_across.model_presets import load_model
from scale_across.topology import Topology

PRODUCTION, PUBLISHED = "production", ("hierarchical", "atlas", "sailor", "crosspipe")
FREED: tuple[Rules, ...] = tuple(
    freed(BASELINES[0], *chosen) for count in (1, 2) for chosen in itertools.combinations(DIMENSIONS, count)
)


class Wan(Config):
    """What a GPU's port gets between two sites."""

    port_gbps: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    """One way."""
    paths: int = Field(default=16, gt=0)
    loss: float = Field(default=0.0, ge=0, lt=1)


class Study(Config):
    """Values to draw from; one of each makes a design point."""

    points: int = Field(default=600, gt=0)
    seed: int = 0
    tolerance: float = Field(default=0.01, ge=0, lt=1)
    """Each search ends when no plan can be faster by more than this."""
    most_simulated: int = Field(default=8, gt=0)
    """Plans that each search simulates at most."""
    models: tuple[str, ...]
    sites: tuple[int, ...]
    gpus: tuple[int, ...]
    """Of all sites together."""
    accelerators: tuple[tuple[str, ...], ...]
    """Kinds that sites have in turn; one: all alike."""
    oversubscription: tuple[float, ...]
    """Of the topmost tier inside a site."""
    wans: tuple[Wan, ...]
    batch_tokens: tuple[int, ...]
    """Of the global batch."""
    seq_lens: tuple[int, ...]

    def point(self, index: int) -> dict[str, Any]:
        """The design point with this number; the same whatever the others are."""
        draw = random.Random(f"{self.seed}/{index}")
        kinds = draw.choice(self.accelerators)
        count = max(draw.choice(self.sites), len(kinds))
        weights = [draw.choice((1, 2, 3, 4)) for _ in range(count)]
        total = draw.choice(self.gpus)
        nodes = [max(1, round(total / 8 * weight / sum(weights))) for weight in weights]
        seq_len, tokens = draw.choice(self.seq_lens), draw.choice(self.batch_tokens)
        wan = draw.choice(self.wans)
        return {
            "point": index,
            "model": draw.choice(self.models),
            "gpus": "+".join(str(8 * count) for count in nodes),
            "accelerators": "+".join(kinds),
            "oversubscription": draw.choice(self.oversubscription),
            "port_gbps": wan.port_gbps,
            "latency_us": wan.latency_us,
            "paths": wan.paths,
            "loss": wan.loss,
            "global_batch": tokens // seq_len,
            "seq_len": seq_len,
        }


def cluster_of(point: dict[str, Any]) -> ClusterSpec:
    """Sites in a ring (two: a line); a link carries a port's rate for every GPU of its smaller site."""
    kinds = str(point["accelerators"]).split("+")
    sites = []
    for index, gpus in enumerate(int(part) for part in str(point["gpus"]).split("+")):
        kind = kinds[index % len(kinds)]
        tiers = (TierSpec(name="node"), TierSpec(name="site", oversubscription=float(point["oversubscription"])))
        node = min(accelerator(kind).node_gpus, 8)
        sites.append(Site(name=f"s{index}", gpus=gpus, accelerator=kind, gpus_per_node=node, tiers=tiers))
    pairs = list(itertools.pairwise(range(len(sites)))) + ([(len(sites) - 1, 0)] if len(sites) > 2 else [])
    links = tuple(
        Link(
            between=(sites[a].name, sites[b].name),
            bandwidth_gbps=float(point["port_gbps"]) * min(sites[a].gpus, sites[b].gpus),
            latency_us=float(point["latency_us"]),
            paths=int(point["paths"]),
            loss=float(point["loss"]),
        )
        for a, b in pairs
    )
    return ClusterSpec(name=f"point-{point['point']}", sites=tuple(sites), links=links)


def run_point(study: Study, point: dict[str, Any]) -> dict[str, Any]:
    """Search one point; steps in seconds, empty where nothing fits."""
    job = TrainingJob(model=point["model"], global_batch=point["global_batch"], seq_len=point["seq_len"])
    topology = Topology.from_cluster(cluster_of(point))
    try:
        found = explore(
            load_model(job.model), topology, job,
            tolerance=study.tolerance, most_simulated=study.most_simulated, rules=(*BASELINES, *FREED),
        )  # fmt: skip
    except ConfigError as error:
        return {**point, "explorer": "", "why_not": str(error)}
    return {**point, **_steps(found)}


def _steps(found: Exploration) -> dict[str, Any]:
    steps = {rules.name: "" for rules in (*BASELINES, *FREED)}
    steps |= {plan.name: f"{plan.step_s:.6g}" for plan in found.baselines}
    return {
        "explorer": f"{found.best.step_s:.6g}",
        "gap": f"{found.gap:.4f}",
        **steps,
        "plan": found.best.describe(),
        "simulated": len(found.simulated),
        "search_s": f"{found.runtime_s:.2f}",
        "why_not": "",
    }


def columns() -> list[str]:
    """Of the result file."""
    design = (
        "point", "model", "gpus", "accelerators", "oversubscription", "port_gbps", "latency_us", "paths", "loss",
        "global_batch", "seq_len",
    )  # fmt: skip
    names = [rules.name for rules in (*BASELINES, *FREED)]
    return [*design, "explorer", "gap", *names, "plan", "simulated", "search_s", "why_not"]


def run_study(study: Study, output: Path, workers: int, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Search every point that `output` lacks; the file is rewritten after each one.

    Raises:
        ConfigError: `output` holds points of another study.
    """
    done = {int(row["point"]): row for row in read_rows(output)} if output.exists() else {}
    for index, row in done.items():
        drawn = study.point(index)
        if any(str(drawn[key]) != row[key] for key in drawn):
            raise ConfigError(f"{output}: point {index} is not what the study draws; name another --output")
    wanted = [index for index in range(study.points) if index not in done]
    progress(len(done), study.points)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_alone)
    try:
        running = [pool.submit(run_point, study, study.point(index)) for index in wanted]
        for one in as_completed(running):
            row = one.result()
            done[int(row["point"])] = {key: str(row.get(key, "")) for key in columns()}
            write_rows(output, [done[index] for index in sorted(done)])
            progress(len(done), study.points)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [done[index] for index in sorted(done)]


def _alone() -> None:
    space_kernel.THREADS = 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows as `write_rows` wrote them."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Written aside and renamed."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    aside.replace(path)
