"""Schedules for links between sites: valid, never below their bound, never worse for more effort; CrossPipe's table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.config import ConfigError
from scale_across.cli import app
from scale_across.pipeline import run
from scale_across.schedule import check_timeline, validate
from scale_across.schedule_bounds import family_bounds_s, unidirectional_bound_s
from scale_across.schedules_cross import (
    Setting,
    best_greedy,
    cross_ud,
    cross_ud_sub,
    cross_wave,
    ours,
)
from scale_across.validate_crosspipe import PUBLISHED_TIMES, TableRow, predict, read_rows, setting

DATA = Path(__file__).resolve().parents[1] / "data" / "crosspipe_two_sites.csv"


def case_1(latency: float, bandwidth: float) -> Setting:
    return setting(TableRow(latency, bandwidth, 1, "", 1.0), 2, *PUBLISHED_TIMES)


@pytest.mark.parametrize("delays", [(0, 0), (0.25, 0.25), (0.25, 2), (2, 0.25), (2, 2)])
def test_the_unidirectional_schedule_of_case_1_meets_its_bound(delays: tuple[float, float]) -> None:
    where = case_1(*delays)
    bound_s = unidirectional_bound_s(where)
    assert cross_ud(where, target_s=bound_s).makespan_s == pytest.approx(bound_s, rel=0.005)


def test_zb_h1_is_optimal_without_delays() -> None:
    """The bound is its formula, m (F + D + W) + (P - 1)(F + D - W)."""
    where = case_1(0, 0)
    f_s, d_s, w_s = where.f_s, where.d_s, where.w_s
    assert unidirectional_bound_s(where) == pytest.approx(16 * (f_s + d_s + w_s) + 7 * (f_s + d_s - w_s))


SETTINGS = st.builds(
    Setting,
    stages=st.just(4),
    sites=st.sampled_from([1, 2, 4]),
    microbatches=st.integers(2, 8),
    f_s=st.just(1.0),
    d_s=st.floats(0.5, 2),
    w_s=st.floats(0.1, 1),
    occupied_s=st.floats(0, 3),
    latency_s=st.floats(0, 3),
    memory=st.integers(3, 8),
)


@settings(max_examples=15, deadline=None)
@given(SETTINGS)
def test_every_schedule_is_valid_within_memory_and_not_below_the_bound(where: Setting) -> None:
    bounds_s = {f"{family} x{n}": bound for n in (1, 2) for family, bound in family_bounds_s(where, n).items()}
    for label, found in ours(where, proposals=300, slices=(1, 2)).items():
        validate(found.schedule, memory_limit=where.memory)
        check_timeline(found.schedule, found.start_SN, found.end_SN - found.start_SN)
        assert found.makespan_s >= bounds_s[label] - 1e-9
    unidirectional = cross_ud(where, proposals=200)
    assert unidirectional.makespan_s >= unidirectional_bound_s(where) - 1e-9
    assert unidirectional.makespan_s <= cross_ud_sub(where).makespan_s
    again = run(unidirectional.schedule, where.pipeline(range(4)))
    assert again.makespan_s == pytest.approx(unidirectional.makespan_s)


def test_annealing_is_deterministic_and_helps() -> None:
    where = case_1(0.25, 0.25)
    plain = cross_wave(where, proposals=0).makespan_s
    once, twice = (cross_wave(where, proposals=4000).makespan_s for _ in range(2))
    assert once == twice < plain


def test_too_little_memory_is_one_error() -> None:
    where = Setting(4, 2, 4, 1, 1, 1, 0, 0, memory=0)
    with pytest.raises(ConfigError, match="no greedy rule gets through; raise the memory limit"):
        best_greedy(where.pipeline(range(4)), "x")


def test_static_schedules_of_the_two_site_table_within_the_floor() -> None:
    rows = [row for row in read_rows(DATA) if row.schedule in ("1f1b", "zb_h1", "zb_v")]
    errors = [abs(predict(row, 2, *PUBLISHED_TIMES) / row.measured - 1) for row in rows]
    assert len(errors) == 30
    assert sum(errors) / len(errors) <= 0.02


def test_dynamic_schedules_at_low_bandwidth_delay() -> None:
    """One row per schedule and delay of case 1; `scale-across validate` does all (mean 2.9 %)."""
    rows = [
        row for row in read_rows(DATA) if row.schedule.startswith("cross") and row.bandwidth <= 0.25 and row.case == 1
    ]
    errors = [abs(predict(row, 2, *PUBLISHED_TIMES) / row.measured - 1) for row in rows]
    assert len(errors) == 9
    assert sum(errors) / len(errors) <= 0.03


def test_validate_reads_the_table_and_refuses_bad_ones(tmp_path: Path) -> None:
    lines = DATA.read_text().splitlines()
    few = tmp_path / "few.csv"
    few.write_text("\n".join([lines[0], *[line for line in lines if ",1f1b," in line]]))
    done = CliRunner().invoke(app, ["validate", str(few), "--json", "--sites", "4"])
    (line,) = json.loads(done.output)
    assert line["source"] == "crosspipe_static"
    assert line["rows"] == 10
    for text, message in (
        (f"{lines[0]}\n0,0,1,dfs,0.1", "schedule is 'dfs'; it can be 1f1b, zb_h1"),
        (f"{lines[0]}\n0,0,4,1f1b,0.1", "case is '4'; it can be 1, 2, 3"),
        (f"{lines[0]}\n0,x,1,1f1b,0.1", "line 2: .* must be numbers"),
        (f"{lines[0]}\n0,0,1,1f1b,-1", "times must be above 0"),
    ):
        few.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_rows(few)
    bad = CliRunner().invoke(app, ["validate", str(DATA), "--sites", "3"])
    assert "sites is 3; it must divide the 8 stages" in str(bad.exception)
