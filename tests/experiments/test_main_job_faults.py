"""The main job interrupted, refused and misused: one clear error, nothing left running."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import cluster

Session = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "experiments" / "configs" / "tiny.yaml"


@pytest.mark.end_to_end
def test_an_interrupt_stops_the_job_and_leaves_nothing_running(
    tmp_path: Path, our_processes: Callable[[Path], list[str]]
) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "session.py"), "demo", "--config", str(TINY)]
    demo = subprocess.Popen([*command, "--run-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "ray job submit" in line:  # the job has been accepted
            break
    demo.send_signal(signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.wait(60) == 130
    assert "interrupted: the job is stopped" in rest
    assert our_processes(tmp_path) == []
    assert cluster.running(tmp_path / "demo") is None


@pytest.mark.end_to_end
def test_a_bad_job_fails_through_ray_job_submit_with_one_clear_error(
    tmp_path: Path, session: Session, our_processes: Callable[[Path], list[str]]
) -> None:
    """Larger than the cluster: the reason is printed and the exit code is not zero."""
    done = session("up", "--config", str(TINY), "--run-dir", str(tmp_path))
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        address = done.stdout.split("--address ")[1].split()[0]
        command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", address, "--", "python"]
        command += [
            str(ROOT / "experiments" / "strat_across.py"),
            "--config",
            str(TINY),
            "--set",
            "job.learner_ranks=9",
        ]
        job = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert job.returncode != 0
        # a set: Ray repeats the end of a failed job's log in its own closing message
        lines = {line for line in (job.stdout + job.stderr).splitlines() if line.startswith("error: ")}
        assert len(lines) == 1
        assert "needs 11 GPUs" in lines.pop()
    finally:
        stopped = session("down", "--run-dir", str(tmp_path))
    assert stopped.returncode == 0
    assert our_processes(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--set", "cluster.sites.0.gpus=0"], "sites.0.gpus"),
        (["--set", "cluster.links=[]"], "no path from"),
        (["--set", "cluster"], "write it as key=value"),
    ],
)
def test_faults_that_can_be_seen_at_once_start_nothing(
    arguments: list[str], expected: str, tmp_path: Path, session: Session
) -> None:
    done = session("demo", "--run-dir", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
