"""The estimate compiled for rows that each have a batch and a network of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from scale_across.estimate import Setup
from scale_across.jit import compiled
from scale_across.parallelism import Parallelism, candidates
from scale_across.space import Floats, Rows
from scale_across.step import JobNumbers, estimate_row

TOTAL_S, BOUND_S, MEMORY_BYTES = 0, 1, 2


def price_rows(setup: Setup, rows: Rows) -> Floats:
    """[N, 3]: seconds, bound in seconds, bytes of the fullest GPU. Compiled on first use (some 10 s, then cached)."""
    out_NF = np.empty((len(rows), 3))
    if len(rows):
        _kernel()(
            np.ascontiguousarray(rows.plans_NF), rows.batch_N, rows.layout_N, rows.tiers_LTF, setup.kinds_KF,
            setup.model_numbers, setup.gpu, setup.stack, setup.job, out_NF,
        )  # fmt: skip
    return out_NF


def compile_kernel(setup: Setup) -> None:
    """Compile, or load from the disk cache, before a clock starts."""
    one = Rows(candidates(tp=1), np.array([setup.job.global_batch]), np.zeros(1, np.int64), setup.tiers_TF[None])
    price_rows(setup, one)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    def make(digest: str) -> Callable[..., None]:
        def kernel(plans_NF, batch_N, layout_N, tiers_LTF, kinds_KF, model, gpu, stack, job, out_NF):  # type: ignore[no-untyped-def]
            _ = digest  # part of the key of the disk cache
            for i in range(len(plans_NF)):
                row = plans_NF[i]
                plan = Parallelism(
                    row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11],
                    row[12], row[13],
                )  # fmt: skip
                one = JobNumbers(batch_N[i], job.seq, job.parameter_bytes, job.gradient_bytes, job.optimizer_bytes)
                result = estimate_row(plan, kinds_KF, model, gpu, stack, tiers_LTF[layout_N[i]], one)
                out_NF[i, 0] = result.total_s
                out_NF[i, 1] = result.bound_s
                out_NF[i, 2] = result.memory_bytes

        return kernel

    return compiled(make)
