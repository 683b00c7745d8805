"""A simulated step as a trace for Perfetto (ui.perfetto.dev), and as a Gantt chart for a report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.config import ConfigError
from scale_across.simulate import StepTimeline

NAMES = ("F", "D", "W", "B")
TITLES = ("forward", "input gradient", "weight gradient", "backward")
COLOURS = ("#4c78a8", "#72b7b2", "#f2a541", "#54a24b")
MESSAGE_COLOUR, COLLECTIVE_COLOUR = "#b279a2", "#e45756"
STAGES, RESOURCES, LOAD = 1, 2, 3
"""Process ids: one group of tracks each."""
MAX_GANTT_BARS = 200_000


def trace_events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Events of the Trace Event Format, times in microseconds.

    Process 1 has a track per stage with its blocks, process 2 two per resource, for messages and for collectives
    (arrows lead from a block over its message to the block that waited for it), process 3 a counter per resource: how
    many transfers it carries or has interrupted.
    """
    t = timeline.tables
    used = _used_resources(timeline)
    yield from _names(timeline, used)
    stage_B = np.repeat(np.arange(len(t.first_S) - 1), np.diff(t.first_S))
    for i, (start_s, length_s) in enumerate(zip(timeline.start_B.tolist(), t.duration_B.tolist(), strict=True)):
        name = f"{NAMES[t.kind_B[i]]}{t.microbatch_B[i]}"
        values = {"microbatch": int(t.microbatch_B[i]), "virtual stage": int(t.virtual_B[i])}
        yield _slice(STAGES, int(stage_B[i]), name, start_s, length_s, TITLES[t.kind_B[i]], values)
    for i in np.nonzero(timeline.sent_B >= 0)[0].tolist():
        route = int(t.route_B[i])
        resource = int(t.resource_P[route])
        name = f"{NAMES[t.kind_B[i]]}{t.microbatch_B[i]} {stage_B[i]}→{route % (len(t.first_S) - 1)}"
        arrival = {"arrives_s": float(timeline.arrive_B[i])}
        length_s = float(t.occupied_s_P[route])
        yield _slice(RESOURCES, 2 * resource, name, float(timeline.sent_B[i]), length_s, "message", arrival)
        end_s = float(timeline.start_B[i] + t.duration_B[i])
        yield _arrow("s", STAGES, int(stage_B[i]), i, end_s)
        yield _arrow("t", RESOURCES, 2 * resource, i, float(timeline.sent_B[i]))
    for i in np.nonzero(t.depends_B >= 0)[0].tolist():
        yield _arrow("f", STAGES, int(stage_B[i]), int(t.depends_B[i]), float(timeline.start_B[i]))
    for j, name in enumerate(t.names_J):
        for h in range(t.phase_J[j], t.phase_J[j + 1]):
            start_s, end_s = float(timeline.begin_H[h]), float(timeline.end_H[h])
            yield _slice(RESOURCES, 2 * int(t.resource_H[h]) + 1, name, start_s, end_s - start_s, "collective", {})
    yield from _load(timeline, used)


def _slice(
    process: int, track: int, name: str, start_s: float, length_s: float, category: str, values: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start_s * 1e6, 3), "dur": round(length_s * 1e6, 3)}
    return {"ph": "X", "pid": process, "tid": track, "name": name, "cat": category, **times, "args": values}


def _arrow(phase: str, process: int, track: int, message: int, at_s: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": phase,
        "pid": process,
        "tid": track,
        "id": message,
        "name": "message",
        "cat": "message",
    }
    return {**event, "ts": round(at_s * 1e6, 3), **({"bp": "e"} if phase == "f" else {})}


def _used_resources(timeline: StepTimeline) -> list[int]:
    return np.nonzero(timeline.busy_s_R > 0)[0].tolist()


def _names(timeline: StepTimeline, used: list[int]) -> Iterator[dict[str, Any]]:
    for process, name in ((STAGES, "stages"), (RESOURCES, "network"), (LOAD, "network load")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for s in range(len(timeline.tables.first_S) - 1):
        yield {"ph": "M", "pid": STAGES, "tid": s, "name": "thread_name", "args": {"name": f"stage {s}"}}
        yield {"ph": "M", "pid": STAGES, "tid": s, "name": "thread_sort_index", "args": {"sort_index": s}}
    for r in used:
        for track, what in ((2 * r, "messages"), (2 * r + 1, "collectives")):
            name = f"{timeline.tables.names_R[r]}: {what}"
            yield {"ph": "M", "pid": RESOURCES, "tid": track, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "M",
                "pid": RESOURCES,
                "tid": track,
                "name": "thread_sort_index",
                "args": {"sort_index": track},
            }


def _messages(timeline: StepTimeline, resource: int) -> list[tuple[float, float]]:
    """(start, length) in seconds of the messages on a resource."""
    t = timeline.tables
    sent = np.nonzero(timeline.sent_B >= 0)[0]
    sent = sent[t.resource_P[t.route_B[sent]] == resource]
    return list(zip(timeline.sent_B[sent].tolist(), t.occupied_s_P[t.route_B[sent]].tolist(), strict=True))


def _collectives(timeline: StepTimeline, resource: int) -> list[tuple[float, float]]:
    """(start, length) in seconds of the legs of collectives on a resource, interruptions included."""
    legs = timeline.tables.resource_H == resource
    begin_H, end_H = timeline.begin_H[legs], timeline.end_H[legs]
    return list(zip(begin_H.tolist(), (end_H - begin_H).tolist(), strict=True))


def _load(timeline: StepTimeline, used: list[int]) -> Iterator[dict[str, Any]]:
    for r in used:
        name, carried = timeline.tables.names_R[r], 0
        spans = _messages(timeline, r) + _collectives(timeline, r)
        changes = [(start, 1) for start, _ in spans] + [(start + length, -1) for start, length in spans]
        for at_s, change in sorted(changes):
            carried += change
            yield {"ph": "C", "pid": LOAD, "name": name, "ts": round(at_s * 1e6, 3), "args": {"transfers": carried}}


def write_trace(timeline: StepTimeline, path: Path) -> None:
    """Write the JSON trace aside and rename it."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("w") as file:
            head = {"displayTimeUnit": "ms", "otherData": {"step_s": f"{timeline.step_s:.6f}"}}
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            for count, event in enumerate(trace_events(timeline)):
                file.write((",\n" if count else "") + json.dumps(event, separators=(",", ":"), ensure_ascii=False))
            file.write("\n]}\n")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"trace: cannot write {path}: {error.strerror}") from None


def write_gantt(timeline: StepTimeline, path: Path, window_s: tuple[float, float] | None = None) -> None:
    """Draw stages and used resources over time; PNG, SVG or PDF by the name's ending.

    Raises:
        ConfigError: an unknown ending, or more than MAX_GANTT_BARS bars (choose a window).
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"gantt: {path.name!r}: must end in .png, .svg or .pdf")
    begin_s, end_s = window_s or (0.0, timeline.step_s)
    bars = _bars(timeline, begin_s, end_s)
    count = sum(len(spans) for _, _, spans in bars)
    if count > MAX_GANTT_BARS:
        raise ConfigError(f"gantt: {count:,} bars; at most {MAX_GANTT_BARS:,} can be drawn, choose a shorter window")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    stages, used = len(timeline.tables.first_S) - 1, _used_resources(timeline)
    rows = stages + len(used)
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.22 * rows))
    for row, colour, spans in bars:
        height = 0.8 if row < stages else 0.5
        edge = "white" if row < stages else colour  # short transfers would vanish behind a white edge
        axes.broken_barh(spans, (row - height / 2, height), facecolors=colour, edgecolor=edge, linewidth=0.2)
    axes.set_yticks(range(rows))
    labels = [f"stage {s}" for s in range(stages)] + [timeline.tables.names_R[r] for r in used]
    axes.set_yticklabels(labels, fontsize=6)
    axes.set(xlim=(begin_s, end_s), ylim=(rows - 0.4, -0.6), xlabel="seconds")
    kinds = sorted({int(kind) for kind in np.unique(timeline.tables.kind_B)})
    legend = [Patch(color=COLOURS[kind], label=TITLES[kind]) for kind in kinds]
    if used:
        legend += [Patch(color=MESSAGE_COLOUR, label="message"), Patch(color=COLLECTIVE_COLOUR, label="collective")]
    axes.legend(handles=legend, ncols=len(legend), fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_title(f"step {timeline.step_s:.3f} s", fontsize=8, loc="left")
    figure.tight_layout()
    aside = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        figure.savefig(aside, dpi=150)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"gantt: cannot write {path}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _bars(timeline: StepTimeline, begin_s: float, end_s: float) -> list[tuple[int, str, list[tuple[float, float]]]]:
    """(row, colour, [(start, length)]) of what lies in the window: stages first, then used resources."""
    t, bars = timeline.tables, []

    def inside(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(start, length) for start, length in spans if start < end_s and start + length > begin_s]

    stages = len(t.first_S) - 1
    for s in range(stages):
        mine = slice(t.first_S[s], t.first_S[s + 1])
        for kind, colour in enumerate(COLOURS):
            chosen = t.kind_B[mine] == kind
            starts, lengths = timeline.start_B[mine][chosen], t.duration_B[mine][chosen]
            bars.append((s, colour, inside(list(zip(starts.tolist(), lengths.tolist(), strict=True)))))
    for row, r in enumerate(_used_resources(timeline), start=stages):
        bars.append((row, COLLECTIVE_COLOUR, inside(_collectives(timeline, r))))
        bars.append((row, MESSAGE_COLOUR, inside(_messages(timeline, r))))
    return [bar for bar in bars if bar[2]]
