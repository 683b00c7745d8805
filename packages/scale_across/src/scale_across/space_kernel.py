"""The lower bound compiled for rows that each have a batch, a network and a schedule of their own, on all cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np

from scale_across.estimate import Setup
from scale_across.families import CODES
from scale_across.jit import compiled
from scale_across.lower_bound import ANY_SCHEDULE, ANY_SHARDING, Far, family_of, lower_bound_row
from scale_across.parallelism import FIELDS, Parallelism, candidates
from scale_across.shares import even_finish
from scale_across.space import Floats, Region, Rows, joined
from scale_across.step import JobNumbers

BOUND_S, MEMORY_SHARE, ESTIMATE_S = 0, 1, 2
THREADS = os.cpu_count() or 1
"""Set to 1 in worker processes that share a machine."""
MIN_PART = 2_000
"""Fewer rows are not worth a thread."""


def bound_rows(region: Region, rows: Rows, technologies: tuple[str, ...]) -> Floats:
    """[N, 3]: lower bound in s, share of the fullest GPU's memory, closed form in s, of the worst kind of GPU.

    Compiled on first use (some 20 s).
    """
    tables = region.tables(technologies)
    found_KNF = [
        _bound(setup, rows, np.ascontiguousarray(rows.batch_NK[:, kind]), tables, region.most_slices)
        for kind, setup in enumerate(region.setups)
    ]
    return np.asarray(np.max(found_KNF, axis=0))


def with_shares(region: Region, rows: Rows, technologies: tuple[str, ...]) -> Rows:
    """Relaxed rows, and where kinds of GPUs differ those with uneven shares of the batch too.

    Seconds of a microbatch are the slope of the bound between the even share and twice that.
    """
    if len(region.setups) == 1 or not len(rows):
        return rows
    tables = region.tables(technologies)
    count_N = rows.microbatches_NK[:, 0]
    once, twice = (
        np.stack(
            [
                _bound(setup, rows, rows.batch_NK[:, kind] * factor, tables, region.most_slices)[:, BOUND_S]
                for kind, setup in enumerate(region.setups)
            ],
            axis=1,
        )
        for factor in (1.0, 2.0)
    )
    each_s_NK = (twice - once) / count_N[:, None]
    fixed_s_NK = np.maximum(once - each_s_NK * count_N[:, None], 0.0)
    plans = [Parallelism(*(int(value) for value in row)) for row in rows.plans_NF]
    units_NK = np.array([region.replicas_of_kind(plan) for plan in plans])
    each_N = rows.plans_NF[:, FIELDS.index("microbatch")]
    total_N = -(-region.batch // each_N)
    multiple_N = np.where(rows.plans_NF[:, FIELDS.index("chunks")] > 1, rows.plans_NF[:, FIELDS.index("pp")], 1)
    shares_NK = even_finish(fixed_s_NK, each_s_NK, units_NK, total_N, multiple_N)
    batch_NK = (shares_NK * (each_N * rows.plans_NF[:, FIELDS.index("dp")])[:, None]).astype(np.float64)
    uneven = np.flatnonzero((batch_NK != rows.batch_NK).any(axis=1))
    return joined([rows, replace(rows.take(uneven), batch_NK=batch_NK[uneven])])


def compile_kernel(setup: Setup) -> None:
    """Compile, or load from the disk cache, before a clock starts."""
    zeros, batch_N = np.zeros(1, np.int64), np.array([setup.job.global_batch])
    one = Rows(candidates(tp=1), batch_N[:, None], zeros, zeros)
    _bound(setup, one, batch_N, (setup.tiers_TF[None], np.ones((1, len(Far._fields)))), 1.0)


def _bound(setup: Setup, rows: Rows, batch_N: Floats, tables: tuple[Floats, Floats], slices: float) -> Floats:
    out_NF = np.empty((len(rows), 3))
    relaxed = [[kind, 0.0, 0.0, slices, 0.0] for kind in (ANY_SHARDING, ANY_SCHEDULE)]
    codes = np.vstack([CODES, relaxed])  # families -2 and -1 are the last rows

    def run(part: slice) -> None:
        _kernel()(
            rows.plans_NF[part], batch_N[part], rows.layout_N[part], rows.family_N[part], codes, *tables,
            setup.kinds_KF, setup.model_numbers, setup.gpu, setup.stack, setup.job, out_NF[part],
        )  # fmt: skip

    workers = min(THREADS, len(rows) // MIN_PART)
    if workers > 1:
        edges = np.linspace(0, len(rows), workers + 1).astype(int)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, [slice(a, b) for a, b in itertools.pairwise(edges)]))
    elif len(rows):
        run(slice(0, len(rows)))
    out_NF[:, MEMORY_SHARE] /= setup.gpu.memory_bytes
    return out_NF


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
                far = Far(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9])
                found = lower_bound_row(plan, family, far, kinds_KF, model, gpu, stack, tiers_LTF[layout_N[i]], one)
                out_NF[i, 0] = found.bound_s
                out_NF[i, 1] = found.memory_bytes
                out_NF[i, 2] = found.estimate_s

        return kernel

    return compiled(make)
