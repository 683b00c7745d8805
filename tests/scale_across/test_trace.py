"""Traces and charts of simulated steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import ConfigError
from scale_across import trace
from scale_across.cli import app
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism
from scale_across.simulate import StepTimeline, simulate
from scale_across.simulate_input import candidate
from scale_across.topology import Topology

PLAN = Parallelism(tp=8, pp=4, dp=4, chunks=2, sp=1, zero=1)


@pytest.fixture(scope="module")
def setup() -> Setup:
    job = TrainingJob(model="llama-3.1-70b", global_batch=32, seq_len=4096)
    return Setup.of(load_model(job.model), Topology.load("llama3-24k"), job)


@pytest.fixture(scope="module")
def timeline(setup: Setup) -> StepTimeline:
    return simulate(*candidate(setup, PLAN))


def test_a_trace_holds_every_block_and_transfer(timeline: StepTimeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_trace(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    kinds = Counter((event["ph"], event["pid"]) for event in events)
    assert kinds["X", trace.STAGES] == 4 * 8 * 2 * 2  # stages x microbatches x chunks x (F, B)
    messages = 8 * (8 - 1) * 2  # of 8 virtual stages each but the last sends forward, each but the first backward
    assert kinds["s", trace.STAGES] == kinds["f", trace.STAGES] == messages
    assert kinds["X", trace.RESOURCES] == messages + len(timeline.begin_H)
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") <= timeline.step_s * 1e6
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_slices_of_a_track_do_not_overlap(timeline: StepTimeline) -> None:
    ends: dict[tuple[int, int], float] = {}
    slices = [event for event in trace.trace_events(timeline) if event["ph"] == "X"]
    for event in sorted(slices, key=lambda e: (e["ts"], e["dur"])):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(track, 0.0) - 0.01  # rounded to nanoseconds
        ends[track] = event["ts"] + event["dur"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_chart_is_drawn(timeline: StepTimeline, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"step.{ending}"
    trace.write_gantt(timeline, path, (0.0, timeline.step_s / 4))
    head = path.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") or b"<svg" in head or b"<?xml" in head
    assert path.stat().st_size > 5000
    with pytest.raises(ConfigError, match="must end in"):
        trace.write_gantt(timeline, tmp_path / "step.gif")


def test_the_command_writes_both(tmp_path: Path) -> None:
    options = ["--tp", "8", "--pp", "4", "--dp", "2", "--global-batch", "16", "--policy", "buckets=4"]
    files = ["-o", str(tmp_path / "t.json"), "--gantt", str(tmp_path / "t.svg")]
    done = CliRunner().invoke(app, ["trace", "llama-3.1-70b", "llama3-24k", *options, *files])
    assert done.exit_code == 0, done.output
    assert "One step, simulated" in done.output
    assert {p.name for p in tmp_path.iterdir()} == {"t.json", "t.svg"}
    wrong = CliRunner().invoke(app, ["trace", "llama-3.1-70b", "llama3-24k", *options, "--policy", "bucket=4"])
    assert isinstance(wrong.exception, ConfigError)
    assert "buckets" in str(wrong.exception)
