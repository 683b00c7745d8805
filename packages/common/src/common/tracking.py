"""MLflow: one parent run per job with the headline metrics, a child run per phase, and nothing lost or doubled.

Values are buffered and sent in batches by a thread, since one call per metric costs tens of milliseconds. A server that
is away is waited for: the buffer keeps what it could not send, in order, and `close` says what never arrived.

Naming: `group/name` (MLflow groups charts by the part before the slash). Values that are not finite are refused: MLflow
would store infinity as 1.8e308.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from common.cluster import LOOPBACK, end_processes, free_port, is_process
from common.config import ConfigError

BATCH = 500
FLUSH_S = 2.0
SERVER_FILE = "mlflow.json"
SERVER_TIMEOUT_S = 60.0


# -- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerInfo:
    """A running MLflow server."""

    url: str
    pid: int
    started_s: float


def start_server(store: Path, port: int | None = None) -> ServerInfo:
    """Start (or find) the MLflow server of the folder `store`: sqlite database, artifacts beside it, loopback only.

    Raises:
        ConfigError: the port is in use, or the server does not answer in time.
    """
    present = running_server(store)
    if present:
        return present
    store.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{(store / 'mlflow.db').resolve()}"
    migrate(database)
    env = dict(os.environ, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true")
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--host", LOOPBACK]
    command += ["--port", str(port), "--workers", "1", "--artifacts-destination", str((store / "artifacts").resolve())]
    with (store / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env
        )
    info = ServerInfo(f"http://{LOOPBACK}:{port}", process.pid, psutil.Process(process.pid).create_time())
    try:
        _await_server(info, process, store)
        (store / SERVER_FILE).write_text(json.dumps(asdict(info)))
    except BaseException:
        end_processes([process.pid])
        raise
    return info


def migrate(database: str) -> None:
    """Bring the database's tables up to date, once, before several processes would race to do it."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(database, "mlflow-artifacts:/")


def _await_server(info: ServerInfo, process: subprocess.Popen[bytes], store: Path) -> None:
    deadline = time.monotonic() + SERVER_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = (store / "server.log").read_text(errors="replace").strip().splitlines()[-5:]
            raise ConfigError("the MLflow server did not start:\n  " + "\n  ".join(tail))
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{info.url}/health", timeout=2),
        ):
            return
        time.sleep(0.1)
    raise ConfigError(f"the MLflow server did not answer within {SERVER_TIMEOUT_S:.0f} s; see {store / 'server.log'}")


def running_server(store: Path) -> ServerInfo | None:
    """The server started for this folder, if it still runs."""
    try:
        info = ServerInfo(**json.loads((store / SERVER_FILE).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    return info if is_process(info.pid, info.started_s) else None


def stop_server(store: Path) -> bool:
    """Stop the server of this folder; False when none runs."""
    info = running_server(store)
    if info:
        end_processes([info.pid])
    (store / SERVER_FILE).unlink(missing_ok=True)
    return info is not None


# -- runs ----------------------------------------------------------------------------------------------------------


class Tracker:
    """Records one job: a parent run and child runs.

    Args:
        uri: MLflow tracking URI.
        experiment: made when missing.
        run_name: of the parent run.
        tags: on the parent run.
        resume_run_id: continue this parent run instead of opening one.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        tags: Mapping[str, str] | None = None,
        resume_run_id: str | None = None,
    ) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(uri)
        found = self.client.get_experiment_by_name(experiment)
        self.experiment_id = found.experiment_id if found else self.client.create_experiment(experiment)
        self.run_id = resume_run_id or self._open(run_name, dict(tags or {}))
        self._pending: deque[tuple[str, str, float, int, int]] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, name="tracker", daemon=True)
        self._thread.start()

    def _open(self, name: str, tags: dict[str, str]) -> str:
        run = self.client.create_run(self.experiment_id, run_name=name, tags={**tags, "mlflow.runName": name})
        return str(run.info.run_id)

    @contextlib.contextmanager
    def child(self, name: str) -> Iterator[str]:
        """Open a child run for one phase; yields its id, and marks it failed when the phase raises."""
        run_id = self._open(name, {"mlflow.parentRunId": self.run_id})
        try:
            yield run_id
        except BaseException:
            self.flush()
            self.client.set_terminated(run_id, "FAILED")
            raise
        self.flush()
        self.client.set_terminated(run_id, "FINISHED")

    def metrics(self, values: Mapping[str, float], step: int = 0, run_id: str | None = None) -> None:
        """Buffer metrics of one step; returns at once.

        Raises:
            ValueError: a value is not finite.
        """
        now_ms = int(time.time() * 1000)
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name!r} is {value}: only finite values can be recorded")
        with self._lock:
            self._pending.extend((run_id or self.run_id, name, float(v), now_ms, step) for name, v in values.items())

    def params(self, values: Mapping[str, Any], run_id: str | None = None) -> None:
        """Record parameters; nested mappings are flattened with dots."""
        from mlflow.entities import Param

        flat = [Param(name, str(value)[:6000]) for name, value in flatten(values).items()]
        for start in range(0, len(flat), 100):
            self.client.log_batch(run_id or self.run_id, params=flat[start : start + 100])

    def tags(self, values: Mapping[str, str], run_id: str | None = None) -> None:
        """Set tags on a run."""
        for name, value in values.items():
            self.client.set_tag(run_id or self.run_id, name, value)

    def text(self, text: str, artifact: str, run_id: str | None = None) -> None:
        """Store text as an artifact file."""
        self.client.log_text(run_id or self.run_id, text, artifact)

    def table(self, rows: Mapping[str, list[Any]], artifact: str, run_id: str | None = None) -> None:
        """Store columns as a table that the MLflow page shows."""
        self.client.log_table(run_id or self.run_id, dict(rows), artifact)

    def figure(self, figure: Any, artifact: str, run_id: str | None = None) -> None:
        """Store a matplotlib figure."""
        self.client.log_figure(run_id or self.run_id, figure, artifact)

    def files(self, folder: Path, artifact_path: str, run_id: str | None = None) -> None:
        """Store a folder of files."""
        self.client.log_artifacts(run_id or self.run_id, str(folder), artifact_path)

    # -- sending ---------------------------------------------------------------------------------------------------

    def _send_forever(self) -> None:
        while not self._stop.wait(FLUSH_S):
            with contextlib.suppress(Exception):  # the server is away: keep the buffer and try again
                self.flush()

    def flush(self) -> None:
        """Send everything that is buffered; raises what MLflow raises, and keeps what was not sent."""
        from mlflow.entities import Metric

        with self._sending:
            while True:
                with self._lock:
                    batch = self._next_batch()
                if not batch:
                    return
                metrics = [Metric(name, value, at_ms, step) for _, name, value, at_ms, step in batch]
                self.client.log_batch(batch[0][0], metrics=metrics)
                with self._lock:
                    for _ in batch:
                        self._pending.popleft()

    def _next_batch(self) -> list[tuple[str, str, float, int, int]]:
        batch: list[tuple[str, str, float, int, int]] = []
        for entry in self._pending:
            if len(batch) == BATCH or (batch and entry[0] != batch[0][0]):
                break
            batch.append(entry)
        return batch

    def close(self, status: str = "FINISHED") -> int:
        """Flush, end the parent run and return how many values could not be sent."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(Exception):
            self.flush()
        with contextlib.suppress(Exception):
            self.client.set_terminated(self.run_id, status)
        return len(self._pending)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` → `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
