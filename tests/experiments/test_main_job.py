"""The main job as a user runs it: simulated sites, the Jobs API, MLflow; and what happens when it cannot run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient

from common import cluster

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "experiments" / "configs" / "tiny.yaml"
PHASES = {
    "warm_start",
    "exploration",
    "placement/production",
    "placement/chosen",
    "evaluation/before",
    "training",
    "evaluation/after",
}


def session(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / "session.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def our_processes(run_dir: Path) -> list[str]:
    """Processes that name the run folder, or a Ray cluster of ours, on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(run_dir) in line and "pytest" not in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def demo(
    live_cluster: object, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole job, while another Ray cluster runs on the host."""
    run_dir = tmp_path_factory.mktemp("run")
    return session("demo", "--config", str(TINY), "--run-dir", str(run_dir), "--set", "train.seed=4"), run_dir


@pytest.mark.end_to_end
def test_the_submitted_job_ends_with_its_tables_and_leaves_nothing_running(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, run_dir = demo
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("ray job submit", "proven optimal", "speedup measured", "exploitability", "make ui"):
        assert text in done.stdout
    assert our_processes(run_dir) == []
    assert cluster.running(run_dir / "demo") is None


@pytest.mark.end_to_end
def test_mlflow_holds_a_parent_with_headlines_and_a_child_per_phase(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, run_dir = demo
    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("stratacross")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    parent = parents[0]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.info.run_name for run in children} == PHASES
    assert all(run.info.status == "FINISHED" for run in runs)
    m = parent.data.metrics
    raw = m["step_s/production/measured"] / m["step_s/chosen/measured"] - 1
    assert m["speedup/measured_raw"] == pytest.approx(raw)
    assert m["speedup/predicted"] > 0  # a thin link: keeping the ranks together must pay
    assert m["gain/exploitability_fall_low"] <= m["gain/exploitability_fall"] <= m["gain/exploitability_fall_high"]
    assert parent.data.params["train.seed"] == "4"
    assert parent.data.tags["link_emulation"] == "calibrated-wait"
    training = next(run for run in children if run.info.run_name == "training")
    assert len(client.get_metric_history(training.info.run_id, "train/loss")) == 3


@pytest.mark.end_to_end
def test_artifacts_hold_plan_configuration_checkpoint_and_transcripts(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, run_dir = demo
    artifacts = {path.name: path for path in (run_dir / "mlflow" / "artifacts").rglob("*") if path.is_file()}
    for name in ("plan.yaml", "plan_production.yaml", "config.yaml", "cluster.yaml", "job.yaml", "transcripts.txt"):
        assert name in artifacts
    assert {"tensors.safetensors", "meta.json"} <= set(artifacts)
    plan = yaml.safe_load(artifacts["plan.yaml"].read_text())
    assert set(plan["placement"]) == {"learner", "rollout", "comparison"}
    assert "OppIntent:" in artifacts["transcripts.txt"].read_text()


@pytest.mark.end_to_end
def test_an_interrupt_stops_the_job_and_leaves_nothing_running(tmp_path: Path) -> None:
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
def test_bad_jobs_fail_through_ray_job_submit_with_one_clear_error(tmp_path: Path) -> None:
    """Larger than the cluster, an unknown key: the reason is printed and the exit code is not zero."""
    done = session("up", "--config", str(TINY), "--run-dir", str(tmp_path))
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        address = done.stdout.split("--address ")[1].split()[0]
        for arguments, expected in (
            (["--config", str(TINY), "--set", "job.learner_ranks=9"], "needs 11 GPUs"),
            (["--config", str(TINY), "--set", "train.stepz=9"], "did you mean 'steps'"),
        ):
            command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", address]
            command += ["--", "python", str(ROOT / "experiments" / "strat_across.py"), *arguments]
            job = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert job.returncode != 0
            # a set: Ray repeats the end of a failed job's log in its own closing message
            lines = {line for line in (job.stdout + job.stderr).splitlines() if line.startswith("error: ")}
            assert len(lines) == 1
            assert expected in lines.pop()
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
def test_faults_that_can_be_seen_at_once_start_nothing(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = session("demo", "--run-dir", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
