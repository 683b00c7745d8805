"""What `make demo`, `make up`, `make down` and `make ui` run: simulated sites and MLflow here, and jobs on them.

python experiments/session.py demo --config experiments/configs/demo.yaml --set train.seed=3
python experiments/session.py up     # sites and MLflow stay up; prints the `ray job submit` command
python experiments/session.py down
python experiments/session.py ui     # MLflow's page over all recorded runs
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from ray.job_submission import JobStatus, JobSubmissionClient
from rich.console import Console

from common import cluster, config, tracking
from common.cluster import ClusterInfo
from common.config import ConfigError
from common.spec import ClusterSpec

ROOT = Path(__file__).resolve().parent.parent
DEMO_CONFIG = ROOT / "experiments" / "configs" / "demo.yaml"
MAIN_JOB = "experiments/strat_across.py"
EXCLUDES = [".git", ".venv", ".run", "docs/figures", "tests"]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)

ConfigOption = Annotated[Path, typer.Option("--config", help="experiment configuration with a `cluster:` part")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key=value over the file; repeatable")]
RunDirOption = Annotated[Path, typer.Option("--run-dir", help="where MLflow's store, checkpoints and state are kept")]
PortOption = Annotated[int | None, typer.Option("--dashboard-port", help="port of the dashboard and Jobs API")]
RUN_DIR = ROOT / ".run"


@contextmanager
def sites(spec: ClusterSpec, run_dir: Path, state: str, port: int | None = None) -> Iterator[ClusterInfo]:
    """MLflow and the simulated sites of `spec`, for as long as the context lasts; nothing is left behind."""
    had_server = tracking.running_server(run_dir / "mlflow") is not None
    try:
        yield start(spec, run_dir, state, port)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
        cluster.down(run_dir / state)
        if not had_server:
            tracking.stop_server(run_dir / "mlflow")
        signal.signal(signal.SIGINT, signal.default_int_handler)


def start(spec: ClusterSpec, run_dir: Path, state: str, dashboard_port: int | None = None) -> ClusterInfo:
    """Start MLflow and the sites; jobs inherit where MLflow is and where outputs go."""
    began = time.monotonic()
    os.environ.pop("RAY_ADDRESS", None)  # never the wrong cluster
    store = run_dir / "mlflow"
    present = tracking.running_server(store)
    port = None if present else cluster.free_port()
    url = present.url if present else f"http://{cluster.LOOPBACK}:{port}"
    os.environ["MLFLOW_TRACKING_URI"] = url
    os.environ["STRATACROSS_OUTPUT"] = str(run_dir / "outputs")
    os.environ["STRATACROSS_COMMIT"] = _commit()
    with ThreadPoolExecutor(1) as pool:  # both take long to start, and neither needs the other
        server = pool.submit(tracking.start_server, store, port)
        info = cluster.up(spec, run_dir / state, dashboard_port=dashboard_port)
        server.result()
    names = ", ".join(f"{site.name} ({site.gpus} GPUs)" for site in spec.sites)
    console.print(f"simulated sites {names} and MLflow at {url} up in {time.monotonic() - began:.0f} s")
    return info


def _commit() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def submit(info: ClusterInfo, arguments: list[str]) -> int:
    """Submit the main job through the Jobs API, follow its log, and return its exit code. Ctrl-C stops the job."""
    client = JobSubmissionClient(info.dashboard_url)
    entrypoint = shlex.join(["python", MAIN_JOB, *arguments])
    job = client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": str(ROOT), "excludes": EXCLUDES})
    try:
        console.print(f"ray job submit --address {info.dashboard_url} --working-dir . -- {entrypoint}\n")
        asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        client.stop_job(job)
        console.print("\ninterrupted: the job is stopped")
        return 130
    details = client.get_job_info(job)
    if details.status == JobStatus.SUCCEEDED:
        return 0
    return details.driver_exit_code or 1


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


@app.command()
def demo(
    config_file: ConfigOption = DEMO_CONFIG,
    overrides: SetOption = None,
    run_dir: RunDirOption = RUN_DIR,
    dashboard_port: PortOption = None,
) -> None:
    """Start sites and MLflow, run the main job to its end, and take everything down again."""
    spec = _cluster_of(config_file, overrides or [])
    with sites(spec, run_dir.resolve(), "demo", dashboard_port) as info:
        code = submit(info, _job_arguments(config_file, overrides or []))
    raise typer.Exit(code)


@app.command()
def up(
    config_file: ConfigOption = DEMO_CONFIG,
    overrides: SetOption = None,
    run_dir: RunDirOption = RUN_DIR,
    dashboard_port: PortOption = None,
) -> None:
    """Start sites and MLflow, leave them up, and print how to submit a job."""
    info = start(_cluster_of(config_file, overrides or []), run_dir.resolve(), "up", dashboard_port)
    job = shlex.join(["python", MAIN_JOB, *_job_arguments(config_file, overrides or [])])
    console.print(f"submit:  .venv/bin/ray job submit --address {info.dashboard_url} --working-dir . -- {job}")
    console.print("stop:    make down")


@app.command()
def down(run_dir: RunDirOption = RUN_DIR) -> None:
    """Stop what `up` started."""
    stopped = cluster.down(run_dir.resolve() / "up")
    served = tracking.stop_server(run_dir.resolve() / "mlflow")
    console.print("stopped" if stopped or served else "nothing was up")


@app.command()
def ui(
    run_dir: RunDirOption = RUN_DIR, port: Annotated[int, typer.Option("--port", help="of MLflow's page")] = 5000
) -> None:
    """Serve MLflow's page over all recorded runs until Ctrl-C."""
    store = run_dir.resolve() / "mlflow"
    if tracking.running_server(store):
        tracking.stop_server(store)
    server = tracking.start_server(store, port)
    console.print(f"MLflow: {server.url}  (Ctrl-C stops it)")
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        tracking.stop_server(store)


def _cluster_of(config_file: Path, overrides: list[str]) -> ClusterSpec:
    data = config.apply_overrides(config.read_yaml(config_file), overrides)
    if "cluster" not in data:
        raise ConfigError(f"{config_file}: has no `cluster:` part; see {DEMO_CONFIG.relative_to(ROOT)}")
    return config.validate(ClusterSpec, data["cluster"], where=f"{config_file}: cluster")


def _job_arguments(config_file: Path, overrides: list[str]) -> list[str]:
    path = config_file.resolve()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return ["--config", str(shown), *(word for override in overrides for word in ("--set", override))]


def main() -> None:
    """Entry point; a ConfigError becomes one line and exit code 2, SIGTERM is treated like Ctrl-C."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
