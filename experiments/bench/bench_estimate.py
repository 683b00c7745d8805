"""Speed of the estimate: candidates per CPU-second in batches, and the time of a single one.

The space is Calculon's published one: GPT-3 175B on 4,096 A100-80G, every split of TP, PP and DP, microbatch, chunks,
recompute, ZeRO and sequence parallelism, a batch of 1,536 (1,081,872 configurations there).

    python experiments/bench/bench_estimate.py
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
import numpy.typing as npt

from common.spec import ClusterSpec, Site
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism, candidates
from scale_across.topology import Topology

GPUS, BATCH = 4096, 1536


def space() -> npt.NDArray[np.int64]:
    """Candidates whose degrees divide model, batch and cluster."""
    rows = []
    for tp, pp in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)):
        if GPUS % (tp * pp) == 0 and BATCH % (GPUS // (tp * pp)) == 0:
            dp = GPUS // (tp * pp)
            sizes = [m for m in range(1, 65) if BATCH % (dp * m) == 0]
            chunks = [v for v in range(1, 97) if 96 % (pp * v) == 0]
            rows += list(itertools.product([tp], [pp], [dp], sizes, chunks))
    degrees = np.array(rows)[:, :, None]
    flags = np.array(list(itertools.product(range(3), range(4), (0, 1), (0, 1), (0, 1))))
    return candidates(
        tp=degrees[:, 0], pp=degrees[:, 1], dp=degrees[:, 2], microbatch=degrees[:, 3], chunks=degrees[:, 4],
        recompute=flags[:, 0], zero=flags[:, 1], sp=flags[:, 2], order=flags[:, 3], reduction=flags[:, 4],
    )  # fmt: skip


def main() -> None:
    """Print `name: value unit` lines; medians of nine."""
    site = Site(name="a", gpus=GPUS, accelerator="a100-80g")
    job = TrainingJob(model="gpt-3-175b", global_batch=BATCH, seq_len=2048)
    setup = Setup.of(load_model(job.model), Topology.from_cluster(ClusterSpec(sites=(site,))), job)
    whole_NF = space()
    batch_NF = np.resize(whole_NF, (100_000, whole_NF.shape[1]))
    started = time.perf_counter()
    setup.estimate_batch(batch_NF[:1])
    print(f"estimate_compile_or_load: {time.perf_counter() - started:.2f} s")
    rates, singles = [], []
    plan = Parallelism(*map(int, whole_NF[0]))
    for _ in range(9):
        started = time.process_time()
        setup.estimate_batch(batch_NF)
        rates.append(len(batch_NF) / (time.process_time() - started))
        started = time.process_time()
        for _ in range(50):
            setup.estimate(plan)
        singles.append((time.process_time() - started) / 50)
    print(f"estimate_space: {len(whole_NF)} candidates")
    print(f"estimate_batch: {statistics.median(rates):.0f} candidates/CPU-s")
    print(f"estimate_single: {statistics.median(singles) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
