"""Uneven batch shares: how many microbatches a replica computes at each kind of GPU so that all end together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
STEPS = 60
"""Of the bisection: far below a microbatch."""


def even_finish(fixed_s_NK: Floats, each_s_NK: Floats, units_NK: Ints, total_N: Ints, multiple_N: Ints) -> Ints:
    """[N, K] microbatches per replica of each kind, the least that ends soonest.

    Minimises max_k (fixed_k + m_k each_k) subject to sum_k units_k m_k >= total, every m_k a positive multiple of
    `multiple`, by bisection on the time: at time T a replica of kind k has done floor((T - fixed_k) / each_k).

    Args:
        fixed_s_NK: of a step, whatever the microbatches (fill, reductions).
        each_s_NK: of a microbatch.
        units_NK: replicas of each kind; kinds with none get the least.
        total_N: microbatches of the whole batch.
        multiple_N: what microbatches must be a multiple of (stages when interleaved).
    """
    multiple = multiple_N[:, None]

    def done(time_N: Floats) -> Ints:
        rounds = np.floor((time_N[:, None] - fixed_s_NK) / each_s_NK / multiple + 1e-9)
        return np.maximum(rounds, 1).astype(np.int64) * multiple

    low = np.zeros(len(total_N))
    most = np.ceil(total_N / np.maximum(units_NK.sum(axis=1), 1)) + multiple_N
    high = (fixed_s_NK + most[:, None] * each_s_NK).max(axis=1)
    for _ in range(STEPS):
        middle = (low + high) / 2
        enough = (units_NK * done(middle)).sum(axis=1) >= total_N
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    return done(high)
