"""Simulated sites on this machine: a local Ray cluster with one labelled node per site.

One *holder* process owns the cluster. It starts the head (dashboard and Jobs API, no workers) and a node per site with
the label `site` and as much of the resource `sim_gpu` as the site has GPUs, writes what it started into the state
folder, and ends it all when it is told to stop or dies. Everything listens on loopback only, and lives in a temporary
folder of its own, so that another Ray cluster on the same host is neither seen nor touched.

    python -m common.cluster up cluster.yaml --state .run/cluster
    python -m common.cluster status --state .run/cluster
    python -m common.cluster down --state .run/cluster
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from common import config
from common.config import ConfigError
from common.spec import ClusterSpec, Site

GPU_RESOURCE = "sim_gpu"
SITE_LABEL = "site"
SPEC_KEY = b"stratacross:cluster_spec"
LOOPBACK = "127.0.0.1"
LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray from replacing 127.0.0.1 by an outer address of the host. A process that connects to a simulated cluster
must have it before it imports ray; jobs inherit it."""
STATE_FILE = "cluster.json"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0

# Each node costs a raylet and its agent; these keep it from costing more.
NODE_OBJECT_STORE_BYTES = 128 * 2**20
NODE_MEMORY_BYTES = 4 * 2**30
QUIET_ENV = {
    **LOOPBACK_ENV,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # loopback only; set "token" yourself before you bind anything else
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_grpc_enable_http_proxy": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class ClusterInfo:
    """How to reach a running simulated cluster."""

    address: str
    """For ray.init."""
    dashboard_url: str
    """For the Jobs API: `ray job submit --address URL`."""
    holder_pid: int
    holder_started_s: float
    """The holder's start time, so that a recycled pid is not taken for it."""
    temp_dir: str
    spec: dict[str, Any]


# -- starting and stopping -----------------------------------------------------------------------------------------


def up(spec: ClusterSpec, state_dir: Path, *, dashboard_port: int | None = None) -> ClusterInfo:
    """Start the simulated sites of `spec` and return once jobs can be submitted.

    Raises:
        ConfigError: a cluster already runs from this state folder, the named port is in use, or the start failed.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    present = running(state_dir)
    if present:
        raise ConfigError(
            f"{state_dir}: a cluster already runs from here (pid {present.holder_pid}, {present.dashboard_url}); "
            "stop it with `make down`, or name another --state folder"
        )
    if dashboard_port is not None and not _port_is_free(dashboard_port):
        raise ConfigError(f"dashboard port {dashboard_port} is in use on {LOOPBACK}; name another port, or none")
    (state_dir / STATE_FILE).unlink(missing_ok=True)
    config_file = state_dir / "cluster_spec.json"
    config_file.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "common.cluster", "hold", str(config_file), "--state", str(state_dir)]
    if dashboard_port is not None:
        command += ["--dashboard-port", str(dashboard_port)]
    with (state_dir / "holder.log").open("wb") as log:
        holder = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_holder_env()
        )
    try:
        return _await_ready(holder, state_dir)
    except BaseException:
        end_processes([holder.pid])
        raise


def _holder_env() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env.update(QUIET_ENV)
    # Workers run `python`; it must be this one even when the virtual environment is not activated.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    return env


def _await_ready(holder: subprocess.Popen[bytes], state_dir: Path) -> ClusterInfo:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        info = running(state_dir)
        if info:
            return info
        if holder.poll() is not None:
            tail = (state_dir / "holder.log").read_text(errors="replace").strip().splitlines()[-8:]
            raise ConfigError("the cluster did not start:\n  " + "\n  ".join(tail))
        time.sleep(0.05)
    raise ConfigError(f"the cluster did not start within {START_TIMEOUT_S:.0f} s; see {state_dir / 'holder.log'}")


def running(state_dir: Path) -> ClusterInfo | None:
    """The cluster started from this state folder, or None; the file of one that died is removed."""
    file = state_dir / STATE_FILE
    try:
        info = ClusterInfo(**json.loads(file.read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    if is_process(info.holder_pid, info.holder_started_s):
        return info
    file.unlink(missing_ok=True)
    shutil.rmtree(info.temp_dir, ignore_errors=True)
    return None


def down(state_dir: Path) -> bool:
    """Stop the cluster of this state folder with all its processes; False when none runs."""
    info = running(state_dir)
    if info is None:
        return False
    end_processes([info.holder_pid])
    (state_dir / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(info.temp_dir, ignore_errors=True)
    return True


def end_processes(roots: list[int]) -> None:
    """Terminate process trees: ask the roots first, so that they clean up, then kill whatever is left."""
    family: list[psutil.Process] = []
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            family += [root, *root.children(recursive=True)]
            root.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def is_process(pid: int, started_s: float) -> bool:
    """Whether the process `pid` that began at `started_s` still runs (not one that got its number later)."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_s) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


# -- the holder ----------------------------------------------------------------------------------------------------


def _hold(spec: ClusterSpec, state_dir: Path, dashboard_port: int | None) -> None:
    """Own the cluster until SIGTERM or SIGINT. Runs as a process of its own, and leads a session of its own."""
    if os.getsid(0) != os.getpid():
        raise ConfigError("`hold` ends its whole session when it stops; start clusters with `up`")
    stop = False

    def on_signal(*_: object) -> None:
        nonlocal stop
        stop = True
        raise KeyboardInterrupt  # also ends a start that is under way

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    # A short path: Unix socket names are limited to 107 characters.
    temp_dir = tempfile.mkdtemp(prefix="sa-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = os.environ["TMPDIR"] = temp_dir
    Path(temp_dir, "ray").mkdir()  # Ray does not make it
    reaper = subprocess.Popen(
        [sys.executable, "-m", "common.cluster", "reap", temp_dir, str(os.getsid(0))],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    cluster = None
    try:
        cluster, url = _start(spec, temp_dir, dashboard_port)
        info = ClusterInfo(
            address=cluster.address,
            dashboard_url=url,
            holder_pid=os.getpid(),
            holder_started_s=psutil.Process().create_time(),
            temp_dir=temp_dir,
            spec=spec.model_dump(mode="json"),
        )
        aside = state_dir / f"{STATE_FILE}.{os.getpid()}"
        aside.write_text(json.dumps(asdict(info), indent=1))
        aside.replace(state_dir / STATE_FILE)
        while not stop:
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (state_dir / STATE_FILE).unlink(missing_ok=True)
        reaper.communicate()  # its input ends: it ends everything that belongs to the cluster
    os._exit(0 if cluster else 1)  # Ray's exit hooks would wait for the processes that are gone


def _reap(temp_dir: str, session: int) -> None:
    """Wait until the holder is gone or lets go, then end all processes of its cluster. Runs as a process of its own.

    Ray's agents outlive a raylet that was killed. They are known by the holder's session; job drivers, which start
    sessions of their own, by the temporary folder in their environment.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(3):  # a process that was about to start others may have done so
        family = [process for process in psutil.process_iter() if _belongs(process, temp_dir, session)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=2)
    shutil.rmtree(temp_dir, ignore_errors=True)


def _belongs(process: psutil.Process, temp_dir: str, session: int) -> bool:
    """Whether a process of the cluster, but neither the holder nor the reaper."""
    try:
        if {"hold", "reap"}.intersection(process.cmdline()):
            return False
        return os.getsid(process.pid) == session or process.environ().get("RAY_TMPDIR") == temp_dir
    except (ProcessLookupError, psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _start(spec: ClusterSpec, temp_dir: str, dashboard_port: int | None) -> tuple[Any, str]:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {
        "node_ip_address": LOOPBACK,
        "object_store_memory": NODE_OBJECT_STORE_BYTES,
        "memory": NODE_MEMORY_BYTES,
        # The folder that RAY_TMPDIR leads to as well: jobs look there for their cluster's address, else take any.
        "temp_dir": str(Path(temp_dir, "ray")),
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **common,
            "num_cpus": 1,
            "include_dashboard": True,
            "dashboard_host": LOOPBACK,
            "dashboard_port": dashboard_port or free_port(),
            "dashboard_agent_listen_port": free_port(),
            "gcs_server_port": free_port(),
            "no_monitor": True,
        },
    )
    for site in spec.sites:
        # A CPU beside each GPU, so that a worker can ask for one of each.
        cluster.add_node(
            wait=False,
            **common,
            num_cpus=site.gpus,
            resources={GPU_RESOURCE: float(site.gpus)},
            labels={SITE_LABEL: site.name, "region": site.region or site.name, "accelerator": site.accelerator},
            include_dashboard=False,
        )
    cluster.wait_for_nodes(timeout=START_TIMEOUT_S)
    GcsClient(address=cluster.address).internal_kv_put(SPEC_KEY, spec.model_dump_json().encode(), True, None)
    url = f"http://{cluster.webui_url}"
    return cluster, url


# -- looking at a live cluster -------------------------------------------------------------------------------------


def discover() -> ClusterSpec:
    """The ClusterSpec of the Ray cluster that this process is connected to.

    Sites come from the node label `site`, GPUs from the resource `GPU` (or `sim_gpu` of simulated sites). Links cannot
    be read off a cluster: simulated clusters publish theirs; on a real one give them in a cluster.yaml.

    Raises:
        ConfigError: not connected, no node carries the label, or several sites and no published links.
    """
    import ray
    from ray.experimental.internal_kv import _internal_kv_get

    if not ray.is_initialized():
        raise ConfigError("discover(): not connected to a Ray cluster; call ray.init(address=...) first")
    nodes = [node for node in ray.nodes() if node["Alive"] and node.get("Labels", {}).get(SITE_LABEL)]
    if not nodes:
        raise ConfigError(
            "no node of the cluster carries the label `site`; start nodes with `ray start --labels site=NAME`"
        )
    gpus: dict[str, int] = {}
    labels: dict[str, dict[str, str]] = {}
    per_node: dict[str, int] = {}
    for node in nodes:
        name = node["Labels"][SITE_LABEL]
        count = int(node["Resources"].get(gpu_resource(), 0))
        gpus[name] = gpus.get(name, 0) + count
        per_node[name] = max(per_node.get(name, 0), count)
        labels[name] = node["Labels"]
    published = _internal_kv_get(SPEC_KEY)
    links = ClusterSpec.model_validate_json(published).links if published else ()
    if len(gpus) > 1 and not links:
        raise ConfigError(f"sites {', '.join(gpus)}: their links are unknown; give bandwidths in a cluster.yaml")
    sites = tuple(
        Site(
            name=name,
            gpus=count,
            gpus_per_node=per_node[name],
            region=labels[name].get("region", ""),
            accelerator=labels[name].get("accelerator", "h100-sxm"),
        )
        for name, count in gpus.items()
        if count
    )
    known = {site.name for site in sites}
    return ClusterSpec(name="live", sites=sites, links=tuple(link for link in links if known >= set(link.between)))


def gpu_resource() -> str:
    """The resource that one worker takes: `sim_gpu` where the connected cluster has it, else `GPU`."""
    import ray

    return GPU_RESOURCE if GPU_RESOURCE in ray.cluster_resources() else "GPU"


# -- command line --------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
StateOption = Annotated[Path, typer.Option("--state", help="folder that remembers the running cluster")]
PortOption = Annotated[int | None, typer.Option("--dashboard-port", help="port of the dashboard and Jobs API")]


@app.command("up")
def _up_command(spec: Path, state: StateOption, dashboard_port: PortOption = None) -> None:
    """Start the simulated sites of a cluster.yaml (or of the `cluster:` part of an experiment's configuration)."""
    data = config.read_yaml(spec)
    cluster = config.validate(ClusterSpec, data.get("cluster", data), where=str(spec))
    info = up(cluster, state.resolve(), dashboard_port=dashboard_port)
    typer.echo(f"cluster {cluster.name!r} is up: jobs at {info.dashboard_url}, ray at {info.address}")


@app.command("down")
def _down_command(state: StateOption) -> None:
    """Stop the cluster and all its processes."""
    typer.echo("stopped" if down(state.resolve()) else "no cluster runs from this state folder")


@app.command("status")
def _status_command(state: StateOption) -> None:
    """Print how to reach the running cluster as JSON; exit code 1 when there is none."""
    info = running(state.resolve())
    if info is None:
        typer.echo("no cluster runs from this state folder", err=True)
        raise typer.Exit(1)
    typer.echo(json.dumps(asdict(info), indent=1))


@app.command("hold", hidden=True)
def _hold_command(spec: Path, state: StateOption, dashboard_port: PortOption = None) -> None:
    """Own the cluster in the foreground; `up` starts this."""
    _hold(config.load(spec, ClusterSpec), state.resolve(), dashboard_port)


@app.command("reap", hidden=True)
def _reap_command(temp_dir: str, session: int) -> None:
    """End what a holder leaves behind; `hold` starts this."""
    _reap(temp_dir, session)


def main() -> None:
    """Entry point; a ConfigError becomes one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
