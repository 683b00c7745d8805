"""Schedules: seconds to generate 64 stages x 256 microbatches, and blocks per CPU-second of the pipeline kernel.

python experiments/bench/bench_schedule.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from scale_across.pipeline import Pipeline, greedy, run
from scale_across.schedules_static import interleaved, one_f_one_b, zb_h1, zb_h2

STAGES, MICROBATCHES = 64, 256


def median_s(action: Callable[[], object]) -> float:
    """Median CPU-seconds of seven runs, after one that compiles."""
    action()
    times = []
    for _ in range(7):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> None:
    """Print `name: value unit` lines."""
    limit = [STAGES] * STAGES
    pipeline = Pipeline.uniform(range(STAGES), STAGES, MICROBATCHES, f_s=1, d_s=1, w_s=1, limit_units_S=limit)
    generators: dict[str, Callable[[], object]] = {
        "1f1b": lambda: one_f_one_b(STAGES, MICROBATCHES),
        "interleaved_2": lambda: interleaved(STAGES, MICROBATCHES, 2),
        "zb_h1": lambda: zb_h1(STAGES, MICROBATCHES),
        "zb_h2": lambda: zb_h2(STAGES, MICROBATCHES),
        "greedy": lambda: greedy(pipeline, "greedy"),
    }
    for name, make in generators.items():
        print(f"generate_{name}_64x256: {median_s(make) * 1e3:.1f} ms")
    schedule = zb_h1(STAGES, MICROBATCHES)
    blocks = int((schedule.kind_SN >= 0).sum())
    print(f"pipeline_kernel: {blocks / median_s(lambda: run(schedule, pipeline)) / 1e6:.1f} million blocks/CPU-s")


if __name__ == "__main__":
    main()
