"""Pipeline training over emulated links: the same losses as one process, and a prediction that is right by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import pipeline_training as pt  # noqa: E402
import pipeline_training_rank as rank  # noqa: E402
import schedule_testbed as st  # noqa: E402
from common.config import ConfigError  # noqa: E402
from common.spec import ClusterSpec, Link, Site  # noqa: E402
from common.testbed import emulated_sites  # noqa: E402
from pipeline_training_predict import (  # noqa: E402
    Load,
    Profile,
    Way,
    cross_setting,
    make_schedule,
    predict_step_s,
    spearman,
)
from pipeline_training_report import Row, fidelity, read_rows, write_rows  # noqa: E402
from scale_across.schedule import B, D, F, Schedule, W, local_v_devices  # noqa: E402

SHAPE = pt.Shape(layers=4, width=16, heads=2, vocabulary=16, tokens=8, sequences=2, seed=3)
TWO = ClusterSpec(
    name="two",
    sites=(Site(name="east", gpus=2), Site(name="west", gpus=2)),
    links=(Link(between=("east", "west"), bandwidth_gbps=0.2, latency_us=1000),),
)
RATE, STEPS, MICROBATCHES = 0.05, 3, 4
PP2, PP4 = ((0, 2),), ((0, 1, 2, 3),)
DP2_PP2, DP4 = ((0, 2), (3, 1)), ((0,), (2,), (3,), (1,))
Grid = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """Loss of every step in one process with plain autograd."""
    torch.set_num_threads(1)
    return pt.single_process_losses(SHAPE, MICROBATCHES, STEPS, RATE)


@pytest.fixture(scope="module")
def four_posts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[rank.Post]]:
    """Four ranks at two sites as threads of this process, which saves four imports of torch; links by waits."""
    sites = ("east", "east", "west", "west")
    folder = str(tmp_path_factory.mktemp("ranks"))
    spec = rank.RankSpec(cluster=TWO, sites=sites, folder=folder, mode="calibrated-wait", shape=SHAPE)
    with ThreadPoolExecutor(4) as pool:
        yield list(pool.map(lambda number: rank.Post(spec, number), range(4)))


def job_of(grid: Grid, schedule: Schedule) -> dict[str, Any]:
    case = st.Case(name="any", sites_RS=(("east",),), schedules=("1f1b",))
    return st._job(case, grid, schedule.device_of_virtual_V, schedule.orders(), schedule.microbatches, STEPS)


def losses(answers: Iterable[dict[str, Any]]) -> list[float]:
    return list(map(float, np.sum([told["losses"] for told in answers], axis=0)))


def breadth_first_split(devices: list[int]) -> Schedule:
    """An order that suits any way of placing chunks: all F, then D and W apart by one microbatch."""
    orders = []
    for stage in range(max(devices) + 1):
        chunks = range(devices.count(stage))
        order = [(F, m, c, 0) for c in chunks for m in range(MICROBATCHES)]
        order += [(D, m, c, 0) for c in reversed(chunks) for m in range(MICROBATCHES)]
        orders.append(order + [(W, m, c, 0) for m in range(MICROBATCHES) for c in chunks])
    return Schedule.from_orders("split", orders, devices)


# -- the training is the same whatever the schedule -------------------------------------------------------------------


@pytest.mark.parametrize("virtuals", [1, 3])
def test_split_gradients_are_those_of_plain_autograd(virtuals: int) -> None:
    chunks = [pt.Chunk(SHAPE, v, virtuals, 1.0) for v in range(virtuals)]
    tokens_BU = pt.batch(SHAPE, 0, 0)
    passed, x = [], None
    for chunk in chunks:
        passed.append(chunk.forward(x, tokens_BU))
        x = passed[-1].out
    gradient = None
    for chunk, held in reversed(list(zip(chunks, passed, strict=True))):
        gradient = chunk.input_gradient(held, gradient)
        assert float(chunk.flat_gradient.abs().max()) == 0, "D computes no weight gradient"
    for chunk, held in zip(chunks, passed, strict=True):
        chunk.weight_gradient(held)

    weights = {name: w.requires_grad_() for name, w in pt.initial_weights(SHAPE, 0, 1).items()}
    y = weights["embed"][tokens_BU[:, :-1]] + weights["position"]
    for i in range(SHAPE.layers):
        y = pt.layer(y, SHAPE.heads, lambda z, kind, i=i: torch.nn.functional.linear(z, weights[f"{i}.{kind}"]))
    logits = torch.nn.functional.rms_norm(y, (SHAPE.width,)) @ weights["head"].T
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BU[:, 1:].flatten()).backward()
    for chunk in chunks:
        for name, found in chunk.gradients.items():
            torch.testing.assert_close(found, weights[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("grid", "schedule"),
    [
        (PP4, make_schedule("gpipe", 4, MICROBATCHES, None, 0)),
        (PP4, make_schedule("1f1b", 4, MICROBATCHES, None, 0)),
        (PP4, make_schedule("zb_h1", 4, MICROBATCHES, None, 0)),
        (PP2, make_schedule("interleaved", 2, MICROBATCHES, None, 0)),
        (PP2, breadth_first_split(local_v_devices(2, 2))),
        (DP2_PP2, make_schedule("zb_h1", 2, MICROBATCHES // 2, None, 0)),
        (DP4, Schedule.from_orders("alone", [[(F, 0, 0, 0), (B, 0, 0, 0)]], [0])),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_losses_are_those_of_one_process(
    four_posts: list[rank.Post], reference: list[float], grid: Grid, schedule: Schedule
) -> None:
    job = rank.Job.model_validate(job_of(grid, schedule))
    spec = rank.RankSpec(cluster=TWO, sites=four_posts[0].sites, folder="", mode="calibrated-wait", shape=SHAPE)
    numbers = [number for row in grid for number in row]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: rank.run_job(four_posts[number], spec, job, 0), numbers))
    assert losses(answers) == pytest.approx(reference, rel=1e-5)


def test_processes_over_links_learn_the_same_and_a_dead_rank_is_named(reference: list[float]) -> None:
    """Links that the kernel shapes where it can be had here; else by waits."""
    case = st.Case(name="pp2", sites_RS=(("east", "west"),), schedules=("zb_h1",))
    with emulated_sites(TWO) as sites, st.started_ranks(sites, (case,), SHAPE) as ranks:
        schedule = make_schedule("zb_h1", 2, MICROBATCHES, None, 0)
        grid = ranks.grid(case.sites_RS)
        assert losses(ranks.ask([0, 1], do="run", warmup=0, **job_of(grid, schedule))) == pytest.approx(
            reference, rel=1e-5
        )
        ways = st.probe_ways(ranks, 50_000)
        assert ways["east", "west"].latency_s >= 0.001
        # 200 Mb/s; a full token bucket lets 6 kB of the 400 kB through at once
        assert ways["east", "west"].s_per_byte >= 0.95 * 8 / 0.2e9
        ranks.processes[1].kill()
        with pytest.raises(ConfigError, match="rank 1 at west ended with code -9"):
            ranks.ask([0, 1], do="run", warmup=0, **job_of(grid, schedule))  # rank 0 waits for it
        ranks.processes[0].kill()
        assert ranks.processes[0].wait() == -9


# -- the prediction ---------------------------------------------------------------------------------------------------


def flat_profile(virtuals: int, latency_s: float, s_per_byte: float) -> Profile:
    """F = D = W = 1 s on every virtual stage."""
    ways = {("east", "west"): Way(latency_s, s_per_byte), ("west", "east"): Way(latency_s, s_per_byte)}
    ways |= {(site, site): Way(0.0, 0.0) for site in ("east", "west")}
    return Profile(np.repeat([[1.0], [1.0], [1.0], [2.0]], virtuals, axis=1), 0.5, ways)


def test_prediction_by_hand() -> None:
    """Two microbatches, GPipe, a message on the link 0.5 s and under way 0.25 s: 10 bytes at 0.05 s each."""
    gpipe = make_schedule("gpipe", 2, 2, None, 0)
    profile = flat_profile(2, 0.25, 0.05)
    # both replicas lie alike: each message takes the link twice as long and arrives when both have. Stage 1: F from
    # 2.25 to 4.25, B to 6.25 and 8.25. Stage 0: the last B from 9.5 to 11.5. Reductions inside a site cost nothing.
    load = Load((("east", "west"), ("east", "west")), 10, (100, 100))
    assert predict_step_s(gpipe, profile, load) == pytest.approx(11.5 + 0.5)
    # a replica at each site: stage 1 ends at 7 and stage 0 at 9. Each reduces in two rounds of 50 bytes, 2.5 s on the
    # link they share: stage 1 from 7, stage 0 from 9.5, stage 1 from 12, stage 0 from 14.5 to 17, there at 17.25
    load = Load((("east", "east"), ("west", "west")), 10, (100, 100))
    assert predict_step_s(gpipe, profile, load) == pytest.approx(17.25 + 0.5)


def test_setting_takes_whole_stages_and_refuses_unequal_groups() -> None:
    profile = flat_profile(4, 0.25, 0.05)
    setting = cross_setting(profile, Load((("east", "east", "west", "west"),), 10, (1,) * 4), 8, 6)
    assert (setting.stages, setting.sites, setting.f_s, setting.occupied_s, setting.latency_s) == (4, 2, 1.0, 0.5, 0.25)
    with pytest.raises(ConfigError, match="no equal groups"):
        cross_setting(profile, Load((("east", "west", "east", "west"),), 10, (1,) * 4), 8, 6)
    with pytest.raises(ConfigError, match="unknown 'best'; known: gpipe"):
        make_schedule("best", 2, 4, None, 0)


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8208, abs=1e-4)  # a textbook case with a tie


# -- the record -------------------------------------------------------------------------------------------------------


def row(cluster: str, schedule: str, predicted_s: float, measured_s: float, settings: str) -> Row:
    return {
        "cluster": cluster, "placement": "pp4", "schedule": schedule, "paced": True, "predicted_s": predicted_s,
        "measured_s": measured_s, "overruns": 0.0, "others": 0.1, "settings": settings,
    }  # fmt: skip


def test_fidelity_by_hand() -> None:
    rows = [row("a", "x", 1.0, 2.0, ""), row("a", "y", 2.0, 1.6, ""), row("b", "x", 3.0, 3.0, "")]
    found = fidelity(rows)
    assert found.mean_error == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert found.bias == pytest.approx((-0.5 + 0.25 + 0) / 3)
    assert found.picks == {"a": pytest.approx(0.25), "b": pytest.approx(0)}
    assert found.rank_correlation == pytest.approx(0.5)


def test_resume_keeps_rows_of_the_same_settings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "study.yaml"
    config.write_text(
        "clusters: [{name: a, sites: [{name: east, gpus: 2}]}]\n"
        "cases: [{name: pp4, sites_RS: [[east]], schedules: [gpipe, 1f1b]}]\n"
    )
    mark = st.load(config, st.Study).fingerprint()
    assert st.load(config, st.Study, ["steps=7"]).fingerprint() != mark
    out = tmp_path / "runs" / "out.csv"
    write_rows(out, [row("a", "gpipe", 1.0, 1.1, mark), row("a", "1f1b", 2.0, 2.1, mark)])
    assert read_rows(out, "other") == []
    st.main(config, None, out, tmp_path / "figure.svg", resume=True)  # all is there: nothing is started
    told = capsys.readouterr().out
    assert "met   mean absolute error 6.9%" in told
    assert (tmp_path / "figure.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("microbatches=3", "3 microbatches over 2 replicas"),
        ("cases.0.sites_RS=[[east,west],[east]]", "same number of stages"),
        ("shape.heads=3", "width 64 is no multiple of heads 3"),
        ("stepz=3", "did you mean 'steps'"),
    ],
)
def test_bad_settings_are_one_clear_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        st.load(ROOT / "experiments" / "configs" / "testbed.yaml", st.Study, [override])
