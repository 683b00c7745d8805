"""CrossPipe's table of measured schedules over sites: block times from its zero-delay rows, everything else predicted.

The file has the columns lat_over_tf, bw_over_tf, case, schedule, seconds_per_microbatch. M70 on 8 stages, T_F = 38 ms
given; T_D and T_W are fitted to the static schedules at zero delay, where no network matters. Static schedules run with
rendezvous transfers, dynamic ones with asynchronous sends, in the best order of their family that we find.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rich.progress import track

from common.config import ConfigError
from scale_across.pipeline import run
from scale_across.schedule import wave_devices
from scale_across.schedules_cross import Setting, best_greedy, cross_ud, cross_ud_sub, cross_wave
from scale_across.schedules_static import one_f_one_b, zb_h1
from scale_across.validate import RowError

COLUMNS = ("lat_over_tf", "bw_over_tf", "case", "schedule", "seconds_per_microbatch")
T_F = 0.038
STAGES = 8
STATIC = ("1f1b", "zb_h1", "zb_v")
DYNAMIC = {"cross_ud_sub": cross_ud_sub, "cross_ud": cross_ud, "cross_wave": cross_wave}
HIGH = 0.25
"""Bandwidth delays above this share of T_F are a source of their own: what holds there is not understood."""


@dataclass(frozen=True)
class TableRow:
    """One measured value."""

    latency: float
    bandwidth: float
    case: int
    schedule: str
    measured: float


def read_rows(path: Path) -> list[TableRow]:
    """All rows.

    Raises:
        ConfigError: a value that is no number, an unknown case or schedule; names line, column and what is valid.
    """
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file, skipinitialspace=True), start=2):
            try:
                latency, bandwidth, case, measured = (float(row[COLUMNS[i]]) for i in (0, 1, 2, 4))
            except (TypeError, ValueError, KeyError):
                raise ConfigError(f"{path}: line {number}: {COLUMNS} must be numbers apart from schedule") from None
            schedule = (row["schedule"] or "").strip()
            if schedule not in (*STATIC, *DYNAMIC):
                known = ", ".join((*STATIC, *DYNAMIC))
                raise ConfigError(f"{path}: line {number}: schedule is {schedule!r}; it can be {known}")
            if case not in (1, 2, 3):
                raise ConfigError(f"{path}: line {number}: case is {row['case']!r}; it can be 1, 2, 3")
            if not (measured > 0 and latency >= 0 and bandwidth >= 0):
                raise ConfigError(f"{path}: line {number}: times must be above 0 and delays at least 0")
            rows.append(TableRow(latency, bandwidth, int(case), schedule, measured))
    if not rows:
        raise ConfigError(f"{path}: no rows below the header")
    return rows


def setting(row: TableRow, sites: int, d_s: float, w_s: float) -> Setting:
    """Case 1: 16 microbatches, memory of 1F1B. 2: 32, recompute layer by layer. 3: 32, twice the memory."""
    return Setting(
        stages=STAGES,
        sites=sites,
        microbatches=16 if row.case == 1 else 32,
        f_s=T_F,
        d_s=d_s + (T_F if row.case == 2 else 0.0),
        w_s=w_s,
        occupied_s=row.bandwidth * T_F,
        latency_s=row.latency * T_F,
        memory=2 * STAGES if row.case == 3 else STAGES,
        checkpoint=0.1 if row.case == 2 else 1.0,
    )


@lru_cache(maxsize=4096)
def predict(row: TableRow, sites: int, d_s: float, w_s: float) -> float:
    """Seconds per microbatch."""
    where = setting(row, sites, d_s, w_s)
    if row.schedule in DYNAMIC:
        return DYNAMIC[row.schedule](where).makespan_s / where.microbatches
    if row.schedule == "zb_v":
        # made for the block times without delays, as its authors' generator does
        blind = setting(TableRow(0, 0, row.case, "zb_v", 1), sites, d_s, w_s)
        devices = wave_devices(STAGES, 2)
        schedule = best_greedy(blind.pipeline(devices), "zb_v").schedule
    else:
        devices = list(range(STAGES))
        schedule = {"1f1b": one_f_one_b, "zb_h1": zb_h1}[row.schedule](STAGES, where.microbatches)
    return run(schedule, where.pipeline(devices), rendezvous=True).makespan_s / where.microbatches


def fit_times(rows: Sequence[TableRow]) -> tuple[float, float]:
    """(T_D, T_W) of least squared error over the zero-delay rows of 1F1B and ZB-H1, grid of 0.5 ms.

    Without such rows, those fitted to the two-site table.
    """
    still = [row for row in rows if row.schedule in ("1f1b", "zb_h1") and row.latency == row.bandwidth == 0]
    if not still:
        return PUBLISHED_TIMES
    grid = [(d / 2000, w / 2000) for d in range(90, 104) for w in range(36, 45)]

    def error(times: tuple[float, float]) -> float:
        return sum((predict(row, 1, *times) / row.measured - 1) ** 2 for row in still)

    return min(grid, key=error)


PUBLISHED_TIMES = (0.048, 0.0195)
"""(T_D, T_W) fitted to the two-site table, for files without zero-delay rows."""


def row_errors(path: Path, sites: int = 2) -> list[RowError]:
    """Predict every row of a file measured over `sites` equal sites.

    Raises:
        ConfigError: sites that do not divide the 8 stages, or a bad file.
    """
    if sites < 1 or STAGES % sites:
        raise ConfigError(f"sites is {sites}; it must divide the {STAGES} stages: 1, 2, 4 or 8")
    rows = read_rows(path)
    d_s, w_s = fit_times(rows)
    errors = []
    for row in track(rows, description=f"{path.name}: schedules", transient=True):
        predicted = predict(row, sites, d_s, w_s)
        if row.schedule in STATIC:
            source = "crosspipe_static"
        else:
            level = "high" if row.bandwidth > HIGH else "low"
            source = f"crosspipe_dynamic_{level}_bandwidth_delay"
        label = (
            f"{row.schedule} case {row.case} latency {row.latency} bandwidth delay {row.bandwidth} T_F, {sites} sites"
        )
        plan = f"T_D {d_s * 1e3:.2f} ms, T_W {w_s * 1e3:.2f} ms"
        error = predicted / row.measured - 1
        errors.append(RowError(source, label, label, "s per microbatch", row.measured, predicted, error, plan, ""))
    return errors
