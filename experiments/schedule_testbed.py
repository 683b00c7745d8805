"""Pretraining on a testbed with real links: pipeline schedules and placements measured, against their prediction.

A small transformer is trained by processes at emulated sites, block by block in the order of a schedule, with
activations, gradients and reductions over gloo across links that the kernel shapes (root) or that are emulated by
calibrated waits. Block times and links are profiled on the real workers; the Explorer's event simulation predicts the
step; the run says what it takes.

    python experiments/schedule_testbed.py --config experiments/configs/testbed.yaml
    python experiments/schedule_testbed.py --config experiments/configs/testbed.yaml --set steps=9 --resume
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import typer
from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.config import Config, ConfigError, load
from common.spec import ClusterSpec
from common.testbed import EmulatedSites, Network, emulated_sites
from pipeline_training import Shape, initial_weights
from pipeline_training_predict import (
    OURS,
    Load,
    Profile,
    Way,
    cross_setting,
    make_schedule,
    predict_step_s,
)
from pipeline_training_rank import Job, RankSpec
from pipeline_training_report import Row, plot, read_rows, report, write_rows
from scale_across.schedule import B, D, F, Schedule, W

RANK_SCRIPT = Path(__file__).with_name("pipeline_training_rank.py")
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
}
"""Memory stays in the process: pages that come and go would make the first use of a block slower than later ones."""


class Case(Config):
    """One placement: the site of every stage of every replica, and the schedules to try on it."""

    name: str
    sites_RS: tuple[tuple[str, ...], ...] = Field(min_length=1)
    schedules: tuple[str, ...] = Field(min_length=1)
    pace_ms: tuple[float, float, float] | None = None
    """F, D, W of a layer; null: as fast as the machine goes."""

    @model_validator(mode="after")
    def _equal_replicas(self) -> Case:
        if len({len(row) for row in self.sites_RS}) != 1:
            raise ValueError(f"case {self.name!r}: all replicas need the same number of stages")
        return self


class Study(Config):
    """The configuration file."""

    network: Network = "auto"
    shape: Shape = Shape()
    microbatches: int = Field(default=8, gt=0)
    """Of a step, over all replicas."""
    steps: int = Field(default=5, gt=0)
    """Measured, after `warmup`."""
    warmup: int = Field(default=1, ge=0)
    profile_steps: int = Field(default=3, gt=0)
    memory: int = Field(default=8, gt=0)
    """Most microbatches of activations on a stage, for `ours`."""
    proposals: int = Field(default=4000, ge=0)
    """Of the search for `ours`."""
    clusters: tuple[ClusterSpec, ...] = Field(min_length=1)
    cases: tuple[Case, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _microbatches_divide(self) -> Study:
        for case in self.cases:
            if self.microbatches % len(case.sites_RS) or self.microbatches // len(case.sites_RS) < 2:
                raise ValueError(
                    f"case {case.name!r}: {self.microbatches} microbatches over {len(case.sites_RS)} replicas"
                )
        return self

    def fingerprint(self) -> str:
        """Tells results of other settings apart; which clusters and cases there are does not matter."""
        settings = self.model_dump(exclude={"clusters", "cases"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


# -- the ranks --------------------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Running rank processes and how to ask them."""

    sites: tuple[str, ...]
    processes: list[subprocess.Popen[str]]

    def ask(self, ranks: Sequence[int], **question: Any) -> list[dict[str, Any]]:
        """Put one request to some ranks at once; their answers in the same order.

        Raises:
            ConfigError: a rank has died; the first to go is named, not those that wait for it.
        """
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):  # the end of its output says what happened
                self._pipe(rank, "stdin").write(json.dumps(question) + "\n")
                self._pipe(rank, "stdin").flush()
        waiting = {self._pipe(rank, "stdout"): rank for rank in ranks}
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            # an answer is one line, so nothing is left in a pipe's buffer that select would not see
            for pipe in select.select(list(waiting), [], [])[0]:
                rank = waiting.pop(pipe)
                answers[rank] = self.read(rank)
        return [answers[rank] for rank in ranks]

    def _pipe(self, rank: int, name: Literal["stdin", "stdout"]) -> IO[str]:
        pipe: IO[str] | None = getattr(self.processes[rank], name)
        assert pipe is not None
        return pipe

    def read(self, rank: int) -> dict[str, Any]:
        """One answer."""
        line = self._pipe(rank, "stdout").readline()
        if not line:
            code = self.processes[rank].wait(timeout=10)
            raise ConfigError(f"rank {rank} at {self.sites[rank]} ended with code {code}; its error is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def grid(self, sites_RS: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
        """A rank at the right site for every stage of every replica."""
        free = {site: [r for r, s in enumerate(self.sites) if s == site] for site in self.sites}
        return tuple(tuple(free[site].pop(0) for site in row) for row in sites_RS)


@contextlib.contextmanager
def started_ranks(sites: EmulatedSites, cases: Sequence[Case], shape: Shape) -> Iterator[Ranks]:
    """As many ranks at each site as the largest case needs there."""
    need: Counter[str] = Counter()
    for case in cases:
        need |= Counter(site for row in case.sites_RS for site in row)
    names = [site.name for site in sites.cluster.sites]
    for site in need:
        if site not in names:
            raise ConfigError(
                f"cases: no site {site!r} in cluster {sites.cluster.name!r}; sites are {', '.join(names)}"
            )
    where = tuple(site for site in names for _ in range(need[site]))
    with tempfile.TemporaryDirectory(prefix="schedule-testbed-") as folder:
        mode: Literal["off", "calibrated-wait"] = "off" if sites.network == "kernel" else "calibrated-wait"
        spec = RankSpec(cluster=sites.cluster, sites=where, folder=folder, mode=mode, shape=shape)
        file = Path(folder, "spec.json")
        file.write_text(spec.model_dump_json())
        environment = {**RANK_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(RANK_SCRIPT.parent), *sys.path])}
        command = [sys.executable, str(RANK_SCRIPT), str(file)]
        ranks = Ranks(
            where, [sites.start(site, [*command, str(rank)], env=environment) for rank, site in enumerate(where)]
        )
        for rank in range(len(where)):
            ranks.read(rank)
        yield ranks
        for rank in range(len(where)):  # end of input is the sign to leave
            ranks._pipe(rank, "stdin").close()
        for process in ranks.processes:
            process.wait(timeout=20)


# -- profile, predict, run --------------------------------------------------------------------------------------------


def probe_ways(ranks: Ranks, nbytes: int) -> dict[tuple[str, str], Way]:
    """Latency and seconds per byte between any two sites, and inside a site that has two ranks."""
    ways = {}
    first = {site: ranks.sites.index(site) for site in ranks.sites}
    for src in first:
        for dst in first:
            if src == dst:
                pair = [rank for rank, site in enumerate(ranks.sites) if site == src][:2]
            else:
                pair = [first[src], first[dst]]
            if len(pair) == 1:
                ways[src, dst] = Way(0.0, 0.0)
                continue
            count = 8
            out, back = ranks.ask(pair, do="probe", between=pair, nbytes=nbytes, count=count)
            latency_s = out["round_trip_s"] / 2
            ways[src, dst] = Way(latency_s, max(0.0, back["arrived_s"] - latency_s) / count / nbytes)
    return ways


def profile_blocks(
    ranks: Ranks, case: Case, devices: Sequence[int], microbatches: int, steps: int
) -> tuple[np.ndarray, float]:
    """([F, D, W, B] x virtual stage in seconds, seconds of the update), from a few steps of a plain order.

    Breadth first; every other microbatch has D and W instead of B. Means over replicas.
    """
    orders = []
    for stage in range(max(devices) + 1):
        chunks = range(list(devices).count(stage))
        order = [(F, m, c, 0) for c in chunks for m in range(microbatches)]
        for c in reversed(chunks):
            for m in range(microbatches):
                order += [(B, m, c, 0)] if m % 2 else [(D, m, c, 0), (W, m, c, 0)]
        orders.append(order)
    grid = ranks.grid(case.sites_RS)
    job = _job(case, grid, devices, orders, microbatches, steps + 1)
    answers = ranks.ask([rank for row in grid for rank in row], do="run", warmup=1, **job)
    sums, counts = np.zeros((4, len(devices))), np.zeros((4, len(devices)))
    for told in answers:
        for kind, virtual, span_s in told["durations"]:
            sums[kind, virtual] += span_s
            counts[kind, virtual] += 1
    return sums / counts, float(np.mean([told["update_s"] for told in answers]))


def _job(
    case: Case,
    grid: Sequence[Sequence[int]],
    devices: Sequence[int],
    orders: Sequence[Any],
    microbatches: int,
    steps: int,
) -> dict[str, Any]:
    f_ms, d_ms, w_ms = case.pace_ms or (0.0, 0.0, 0.0)
    pace_s = None if case.pace_ms is None else (f_ms / 1e3, d_ms / 1e3, w_ms / 1e3)
    job = Job(
        ranks_RS=tuple(map(tuple, grid)), device_of_virtual_V=tuple(map(int, devices)),
        orders=tuple(tuple(order) for order in orders), microbatches=microbatches, steps=steps, pace_s=pace_s,
    )  # fmt: skip
    return job.model_dump(mode="json")


def busy_s(pids: Sequence[int] = ()) -> float:
    """Processor seconds used so far by the whole machine, or by some of its processes."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    if not pids:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return (user + nice + system + irq + softirq) * tick_s
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum((int(field[11]) + int(field[12])) * tick_s for field in fields)


@dataclass
class Bench:
    """One cluster with its ranks, links probed; blocks are profiled once per case and way of cutting the model."""

    study: Study
    ranks: Ranks
    ways: dict[tuple[str, str], Way]
    pids: tuple[int, ...] = ()
    """Our own processes."""

    def __post_init__(self) -> None:
        self._profiles: dict[tuple[str, tuple[int, ...]], Profile] = {}

    def profile(self, case: Case, devices: Sequence[int]) -> Profile:
        """Measured block times of a case whose virtual stages lie on `devices`."""
        key = (case.name, tuple(int(device) for device in devices))
        if key not in self._profiles:
            microbatches = self.study.microbatches // len(case.sites_RS)
            durations, update_s = profile_blocks(self.ranks, case, key[1], microbatches, self.study.profile_steps)
            self._profiles[key] = Profile(durations, update_s, self.ways)
        return self._profiles[key]

    def load(self, case: Case, virtuals: int) -> Load:
        """Bytes of boundaries and gradients."""
        shape = self.study.shape
        gradients = (4 * sum(w.numel() for w in initial_weights(shape, v, virtuals).values()) for v in range(virtuals))
        return Load(case.sites_RS, shape.boundary_bytes, tuple(gradients))

    def schedule(self, case: Case, name: str) -> Schedule:
        """By name; `ours` is made for the measured times."""
        stages, microbatches = len(case.sites_RS[0]), self.study.microbatches // len(case.sites_RS)
        setting = None
        if name == OURS:
            plain = self.profile(case, range(stages))
            setting = cross_setting(plain, self.load(case, stages), microbatches, self.study.memory)
        return make_schedule(name, stages, microbatches, setting, self.study.proposals)

    def measure(self, case: Case, name: str) -> Row:
        """Predict, then run."""
        schedule = self.schedule(case, name)
        devices = schedule.device_of_virtual_V.tolist()
        profile, load = self.profile(case, devices), self.load(case, schedule.virtuals)
        predicted_s = predict_step_s(schedule, profile, load)
        grid = self.ranks.grid(case.sites_RS)
        everyone = [rank for row in grid for rank in row]
        steps = self.study.warmup + self.study.steps
        job = _job(case, grid, devices, schedule.orders(), schedule.microbatches, steps)
        begin_s, used_s = time.monotonic(), busy_s() - busy_s(self.pids)
        answers = self.ranks.ask(everyone, do="run", warmup=self.study.warmup, **job)
        others = (busy_s() - busy_s(self.pids) - used_s) / (time.monotonic() - begin_s)
        times = np.array([told["times"] for told in answers])[:, self.study.warmup :]
        step_s = times[:, :, 1].max(axis=0) - times[:, :, 0].min(axis=0)
        losses = np.sum([told["losses"] for told in answers], axis=0)
        return {
            "placement": case.name,
            "schedule": name,
            "order": schedule.name,
            "paced": case.pace_ms is not None,
            "predicted_s": round(predicted_s, 5),
            "measured_s": round(float(np.median(step_s)), 5),
            "fastest_s": round(float(step_s.min()), 5),
            "slowest_s": round(float(step_s.max()), 5),
            "overruns": round(sum(told["overruns"] for told in answers) / sum(t["blocks"] for t in answers), 4),
            "others": round(max(0.0, others), 2),
            "first_loss": round(float(losses[0]), 6),
            "last_loss": round(float(losses[-1]), 6),
        }


def run_cluster(
    study: Study, cluster: ClusterSpec, done: set[tuple[str, str, str]], progress: Progress
) -> Iterator[Row]:
    """All cases on one cluster, without those in `done`."""
    todo = [
        (case, name) for case in study.cases for name in case.schedules if (cluster.name, case.name, name) not in done
    ]
    if not todo:
        return
    task = progress.add_task(cluster.name, total=len(todo))
    with emulated_sites(cluster, study.network) as sites, started_ranks(sites, study.cases, study.shape) as ranks:
        pids = (os.getpid(), *(process.pid for process in ranks.processes))
        pids += (sites.relay.pid,) if sites.relay else ()
        bench = Bench(study, ranks, probe_ways(ranks, study.shape.boundary_bytes), pids)
        names = [site.name for site in cluster.sites]
        across = bench.ways[names[0], names[-1]]
        for case, name in todo:
            row = bench.measure(case, name)
            yield {
                "cluster": cluster.name,
                "mbps": round(8e-6 / across.s_per_byte, 1),
                "latency_ms": round(across.latency_s * 1e3, 2),
                **row,
                **{"network": sites.network, "delay": sites.record().get("delay", "booked")},
                "settings": study.fingerprint(),
            }
            progress.advance(task)


def main(
    config_file: Annotated[Path, typer.Option("--config", help="YAML file; see experiments/configs/testbed.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value over the file, e.g. --set steps=9; repeatable")
    ] = None,
    output: Annotated[Path, typer.Option(help="CSV of all runs, written after each")] = Path(
        "experiments/results/testbed.csv"
    ),
    figure: Annotated[Path | None, typer.Option(help="predicted against measured, as SVG")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep rows of OUTPUT that have the same settings")] = False,
) -> None:
    """Measure pipeline schedules over real links and compare with the prediction.

    Example: python experiments/schedule_testbed.py --config experiments/configs/testbed.yaml --set network=kernel
    """
    study = load(config_file, Study, overrides or [])
    rows = read_rows(output, study.fingerprint()) if resume else []
    done = {(str(row["cluster"]), str(row["placement"]), str(row["schedule"])) for row in rows}
    console = Console(width=120)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for cluster in study.clusters:
            for row in run_cluster(study, cluster, done, progress):
                rows.append(row)
                write_rows(output, rows)
    report(rows, console)
    if figure is not None:
        plot(rows, figure)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigError as error:
        sys.exit(f"error: {error}")
