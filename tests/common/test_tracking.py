"""MLflow over sqlite, without and with its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import tracking
from common.tracking import Tracker, flatten


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
    tracking.migrate(uri)
    return uri


@pytest.fixture
def tracker(database: str) -> Iterator[Tracker]:
    made = Tracker(database, "experiment", "parent", {"seed": "3"})
    yield made
    made.close()


def history(tracker: Tracker, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in tracker.client.get_metric_history(run_id, name)]


def test_parent_and_child_runs_hold_their_metrics(tracker: Tracker) -> None:
    with tracker.child("phase") as child:
        for step in range(700):  # more than one batch
            tracker.metrics({"loss": step / 2}, step, child)
    tracker.metrics({"speedup/measured": 0.25})
    assert tracker.close() == 0
    assert history(tracker, child, "loss") == [(step, step / 2) for step in range(700)]
    assert history(tracker, tracker.run_id, "speedup/measured") == [(0, 0.25)]
    run = tracker.client.get_run(child)
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == tracker.run_id


def test_a_failing_phase_is_marked_failed(tracker: Tracker) -> None:
    def fail() -> None:
        with tracker.child("phase") as child:
            ids.append(child)
            raise RuntimeError("boom")

    ids: list[str] = []
    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert tracker.client.get_run(ids[0]).info.status == "FAILED"


def test_nothing_is_lost_or_doubled_while_the_server_is_away(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    send, calls = tracker.client.log_batch, 0

    def flaky(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise ConnectionError("away")
        send(*args, **kwargs)

    monkeypatch.setattr(tracker.client, "log_batch", flaky)
    for step in range(5):
        tracker.metrics({"x": float(step)}, step)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            tracker.flush()
    tracker.flush()
    assert history(tracker, tracker.run_id, "x") == [(step, float(step)) for step in range(5)]


def test_values_that_never_arrive_are_counted(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(database, "experiment", "parent")

    def away(*args: object, **kwargs: object) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(tracker.client, "log_batch", away)
    tracker.metrics({"x": 1.0, "y": 2.0})
    assert tracker.close() == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_mlflow_would_falsify_are_refused(tracker: Tracker, value: float) -> None:
    with pytest.raises(ValueError, match="only finite values"):
        tracker.metrics({"x": value})


def test_nested_parameters_become_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_the_server_listens_on_loopback_and_stops_with_all_its_processes(tmp_path: Path) -> None:
    info = tracking.start_server(tmp_path)
    try:
        assert tracking.start_server(tmp_path) == info  # found, not started twice
        root = psutil.Process(info.pid)
        family = [root, *root.children(recursive=True)]
        listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {"127.0.0.1"}
        Tracker(info.url, "experiment", "parent").close()
    finally:
        assert tracking.stop_server(tmp_path)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
