"""The main job as a user runs it: simulated sites, the Jobs API, MLflow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from common import cluster

Session = Callable[..., subprocess.CompletedProcess[str]]
TINY = Path(__file__).resolve().parents[2] / "experiments" / "configs" / "tiny.yaml"
PHASES = {
    "warm_start",
    "exploration",
    "placement/production",
    "placement/chosen",
    "evaluation/before",
    "training",
    "evaluation/after",
}


@pytest.fixture(scope="module")
def demo(
    live_cluster: object, session: Session, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole job, while another Ray cluster runs on the host."""
    run_dir = tmp_path_factory.mktemp("run")
    return session("demo", "--config", str(TINY), "--run-dir", str(run_dir), "--set", "train.seed=4"), run_dir


@pytest.mark.end_to_end
def test_the_submitted_job_ends_with_its_tables_and_leaves_nothing_running(
    demo: tuple[subprocess.CompletedProcess[str], Path], our_processes: Callable[[Path], list[str]]
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
