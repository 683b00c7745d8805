"""Cross-site schedules against a checker of their links and memory that shares no code with the kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from scale_across.pipeline import Run, run
from scale_across.schedule import D, F, W, validate
from scale_across.schedules_cross import Setting, cross_ud, ours
from scale_across.schedules_static import one_f_one_b
from scale_across.validate_crosspipe import PUBLISHED_TIMES, TableRow, setting

Key = tuple[int, int, int, int]
"""(kind, virtual stage, microbatch, slice)."""


def times_of(found: Run) -> dict[Key, tuple[float, float]]:
    """Start and end of every block."""
    schedule, times = found.schedule, {}
    for stage, place in np.argwhere(schedule.kind_SN >= 0):
        tables = (schedule.kind_SN, schedule.virtual_SN, schedule.microbatch_SN, schedule.slice_SN)
        kind, virtual, microbatch, cut = (int(table[stage, place]) for table in tables)
        span = (float(found.start_SN[stage, place]), float(found.end_SN[stage, place]))
        for part in (D, W) if kind == 3 else (kind,):
            times[part, virtual, microbatch, cut] = span
    return times


def check_links(found: Run, where: Setting) -> int:
    """Every message crosses after its block ended, one at a time per direction, and arrives in time; their number."""
    schedule, times = found.schedule, times_of(found)
    site = [int(device) // (where.stages // where.sites) for device in schedule.device_of_virtual_V]
    messages: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for (kind, virtual, microbatch, cut), (_, end) in times.items():
        to = virtual + {F: 1, D: -1}.get(kind, 0)
        if 0 <= to < len(site) and site[to] != site[virtual]:
            messages[site[virtual], site[to]].append((end, times[kind, to, microbatch, cut][0]))
    for waiting in messages.values():
        free = 0.0
        for ready, needed in sorted(waiting):
            free = max(free, ready) + where.occupied_s / schedule.slices
            assert needed >= free + where.latency_s - 1e-9
    return sum(map(len, messages.values()))


def check_memory(found: Run, where: Setting) -> None:
    """At no place of an order more than the limit; F leaves a checkpoint, D brings back the rest, W frees both."""
    chunks = found.schedule.virtuals / where.stages
    change = {F: where.checkpoint, D: 1 - where.checkpoint, W: -1.0}
    for order in found.schedule.orders():
        held = np.cumsum([change[block[0]] for block in order]) / chunks / found.schedule.slices
        assert held.max() <= where.memory + 1e-9
        assert held[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("case", [1, 2])
def test_ours_keeps_to_links_and_memory(case: int) -> None:
    where = setting(TableRow(2, 2, case, "", 1.0), 2, *PUBLISHED_TIMES)
    for label, found in ours(where, proposals=200, slices=(1, 2)).items():
        validate(found.schedule)
        # per unit: unidirectional and local V cross once each way, a wave twice
        crossings = 4 if label.startswith("wave") else 2
        assert check_links(found, where) == crossings * where.microbatches * found.schedule.slices
        check_memory(found, where)


def test_four_sites_cross_three_boundaries_each_way() -> None:
    where = setting(TableRow(0.25, 0.25, 1, "", 1.0), 4, *PUBLISHED_TIMES)
    assert check_links(cross_ud(where, proposals=300), where) == 6 * 16


def test_the_checker_sees_a_message_that_never_crossed_the_link() -> None:
    """A run without delays, checked against delays; and more memory than there is."""
    where = setting(TableRow(2, 0, 1, "", 1.0), 2, *PUBLISHED_TIMES)
    still = replace(where, latency_s=0.0)
    found = run(one_f_one_b(8, 16), still.pipeline(range(8)))
    check_links(found, still)
    with pytest.raises(AssertionError):
        check_links(found, where)
    queued = replace(still, occupied_s=1.0)
    with pytest.raises(AssertionError):
        check_links(found, queued)
    split = cross_ud(where, proposals=0)
    check_memory(split, where)
    with pytest.raises(AssertionError):
        check_memory(split, replace(where, memory=4))
