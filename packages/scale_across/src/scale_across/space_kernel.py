"""The lower bound compiled for rows that each have a batch, a network and a schedule of their own, on all cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from scale_across.estimate import Setup
from scale_across.families import CODES
from scale_across.jit import compiled
from scale_across.lower_bound import ANY_SCHEDULE, ANY_SHARDING, Far, family_of, lower_bound_row
from scale_across.parallelism import Parallelism, candidates
from scale_across.space import Floats, Rows
from scale_across.step import JobNumbers

BOUND_S, MEMORY_BYTES, ESTIMATE_S = 0, 1, 2
MIN_PART = 2_000
"""Fewer rows are not worth a thread."""


def bound_rows(setup: Setup, rows: Rows, tables: tuple[Floats, Floats], slices: float) -> Floats:
    """[N, 3]: lower bound in s, bytes of the fullest GPU, closed form in s. Compiled on first use (some 20 s).

    Args:
        tables: of the region (`Region.tables`).
        slices: most sequence slices of any schedule that a relaxed row stands for.
    """
    out_NF = np.empty((len(rows), 3))
    relaxed = [[kind, 0.0, 0.0, slices, 0.0] for kind in (ANY_SHARDING, ANY_SCHEDULE)]
    codes = np.vstack([CODES, relaxed])  # families -2 and -1 are the last rows

    def run(part: slice) -> None:
        _kernel()(
            rows.plans_NF[part], rows.batch_N[part], rows.layout_N[part], rows.family_N[part], codes, *tables,
            setup.kinds_KF, setup.model_numbers, setup.gpu, setup.stack, setup.job, out_NF[part],
        )  # fmt: skip

    workers = min(os.cpu_count() or 1, len(rows) // MIN_PART)
    if workers <= 1:
        if len(rows):
            run(slice(0, len(rows)))
        return out_NF
    edges = np.linspace(0, len(rows), workers + 1).astype(int)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, [slice(a, b) for a, b in itertools.pairwise(edges)]))
    return out_NF


def compile_kernel(setup: Setup) -> None:
    """Compile, or load from the disk cache, before a clock starts."""
    zeros = np.zeros(1, np.int64)
    one = Rows(candidates(tp=1), np.array([setup.job.global_batch]), zeros, zeros)
    bound_rows(setup, one, (setup.tiers_TF[None], np.ones((1, len(Far._fields)))), 1.0)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    def make(digest: str) -> Callable[..., None]:
        def kernel(  # type: ignore[no-untyped-def]
            plans_NF, batch_N, layout_N, family_N, codes_CF, tiers_LTF, far_LF, kinds_KF, model, gpu, stack, job, out_NF
        ):
            _ = digest  # part of the key of the disk cache
            for i in range(len(plans_NF)):
                row = plans_NF[i]
                plan = Parallelism(
                    row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11],
                    row[12], row[13],
                )  # fmt: skip
                one = JobNumbers(batch_N[i], job.seq, job.parameter_bytes, job.gradient_bytes, job.optimizer_bytes)
                code = codes_CF[family_N[i]]
                pp, chunks = float(plan.pp), float(plan.chunks)
                family = family_of(
                    int(code[0]), int(code[1]), int(code[2]), code[3], code[4], pp, chunks,
                    batch_N[i] / (plan.dp * plan.microbatch),
                )  # fmt: skip
                f = far_LF[layout_N[i]]
                far = Far(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8])
                found = lower_bound_row(plan, family, far, kinds_KF, model, gpu, stack, tiers_LTF[layout_N[i]], one)
                out_NF[i, 0] = found.bound_s
                out_NF[i, 1] = found.memory_bytes
                out_NF[i, 2] = found.estimate_s

        return kernel

    return compiled(make)
