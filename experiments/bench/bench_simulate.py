"""Speed of the event simulation: blocks per CPU-second of both kernels, and a step of 131,072 GPUs over five sites.

python experiments/bench/bench_simulate.py
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

from scale_across import simulate_kernel as kernel
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import Parallelism
from scale_across.schedules_static import interleaved
from scale_across.simulate import run_tables, simulate
from scale_across.simulate_input import candidate
from scale_across.simulate_tables import Work, build_tables
from scale_across.topology import Topology

STAGES, CHUNKS, MICROBATCHES = 16, 8, 256


def five_sites() -> Topology:
    """Five buildings of 26,624 H100 each with the tiers of `meta-region`, every pair joined."""
    spec = Topology.load("meta-region").spec
    sites = tuple(site.model_copy(update={"gpus": 26_624}) for site in spec.sites)
    return Topology.from_cluster(spec.model_copy(update={"sites": sites}))


def cpu_s(function: Callable[..., object], *arguments: object) -> float:
    """Median CPU time of nine calls."""
    times = []
    for _ in range(9):
        started = time.process_time()
        function(*arguments)
        times.append(time.process_time() - started)
    return statistics.median(times)


def plain_work(stages: int, chunks: int) -> Work:
    """F 1, B 2, every pair of stages its own stream."""
    shape = (stages, stages)
    return Work(
        duration_KV=np.tile(np.array([[1.0], [1.0], [1.0], [2.0]]), (1, stages * chunks)),
        resource_SS=np.arange(stages * stages, dtype=np.int32).reshape(shape),
        occupied_s_SS=np.full(shape, 0.1),
        latency_s_SS=np.full(shape, 0.05),
        resources=("",) * stages**2,
        replicas_R=np.ones(stages * stages, np.int32),
    )


def main() -> None:
    """Print `name: value unit` lines; medians of nine in CPU time."""
    started = time.perf_counter()
    simulate(interleaved(2, 2, 1), plain_work(2, 1))
    print(f"simulate_compile_or_load: {time.perf_counter() - started:.2f} s")
    tables = build_tables(interleaved(STAGES, MICROBATCHES, CHUNKS), plain_work(STAGES, CHUNKS), OverlapPolicy())
    blocks = len(tables.duration_B)
    buffers = [np.zeros(blocks) for _ in range(3)]

    def fixed() -> None:
        buffers[2].fill(kernel.UNKNOWN)
        ran = kernel.run_fixed(
            tables.first_S, tables.duration_B, tables.depends_B, tables.route_B, tables.resource_P,
            tables.occupied_s_P, tables.latency_s_P, 0.0, np.zeros(STAGES**2), *buffers,
        )  # fmt: skip
        assert ran == blocks

    def twenty() -> None:
        for _ in range(20):
            fixed()

    print(f"simulate_fixed_order: {20 * blocks / cpu_s(twenty) / 1e6:.1f} M blocks/CPU-s")
    one_link = plain_work(STAGES, CHUNKS)
    one_link.resource_SS.fill(0)
    shared = build_tables(interleaved(STAGES, MICROBATCHES, CHUNKS), one_link, OverlapPolicy())
    rate = blocks / cpu_s(run_tables, shared, one_link, OverlapPolicy())
    print(f"simulate_events_shared_link: {rate / 1e6:.1f} M blocks/CPU-s")

    job = TrainingJob(model="llama-3.1-405b", global_batch=MICROBATCHES * 1024, seq_len=8192)
    setup = Setup.of(load_model(job.model), five_sites(), job)
    plan = Parallelism(tp=8, pp=STAGES, dp=1024, chunks=CHUNKS, sp=1, zero=1, reduction=1)
    inputs_s = cpu_s(candidate, setup, plan)
    step_s = cpu_s(simulate, *candidate(setup, plan))
    timeline = simulate(*candidate(setup, plan))
    print(f"simulate_131072_gpus_inputs: {inputs_s * 1e3:.1f} ms")
    print(f"simulate_131072_gpus_step: {step_s * 1e3:.1f} ms")
    print(f"simulate_131072_gpus_predicted_step: {timeline.step_s:.2f} s")
    print(f"simulate_peak_memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
