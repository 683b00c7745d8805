"""Plans as simulated work: durations of the estimate, Megatron's block order, policies."""

from __future__ import annotations

import numpy as np
import pytest

from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import Parallelism
from scale_across.schedules_static import interleaved
from scale_across.simulate import Work, simulate
from scale_across.simulate_input import candidate, work_of
from scale_across.topology import Topology

PLAN = Parallelism(tp=8, pp=4, dp=4, chunks=2, sp=1, zero=1)


@pytest.fixture(scope="module")
def setup() -> Setup:
    job = TrainingJob(model="llama-3.1-70b", global_batch=32, seq_len=4096)
    return Setup.of(load_model(job.model), Topology.load("llama3-24k"), job)


def test_durations_add_up_to_the_estimate(setup: Setup) -> None:
    """One stage computes for one microbatch what the closed form says, and a plan without a network has no more."""
    one = Parallelism(tp=8, dp=1, zero=0, sp=1)
    closed = setup.estimate(one)
    found = simulate(*candidate(setup, one))
    assert found.step_s == pytest.approx(closed.total_s, rel=1e-6)
    durations_KV = work_of(setup, one).duration_KV
    assert durations_KV[3] == pytest.approx(durations_KV[1] + durations_KV[2])  # B is D and W


def test_megatron_order_by_hand() -> None:
    """Two stages, two chunks, two microbatches: warm-up of 2 (S - s - 1) + (v - 1) S = 4 and 2 forward blocks."""
    order = interleaved(2, 2, 2)
    assert order.kind_SN.tolist() == [[0, 0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 3, 0, 3, 3, 3]]
    assert order.chunk_SN[0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert order.microbatch_SN[1].tolist() == [0, 1, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (8, 4, 16)])
def test_interleaving_divides_the_bubble(stages: int, chunks: int, microbatches: int) -> None:
    """Narayanan et al. 2021: fill and drain of (S - 1) (F + B) / v, F = 1, B = 2 per chunk."""
    shape = (stages, stages)
    work = Work(
        duration_KV=np.tile(np.array([[1.0], [1.0], [1.0], [2.0]]), (1, stages * chunks)),
        resource_SS=np.arange(stages * stages, dtype=np.int32).reshape(shape),
        occupied_s_SS=np.zeros(shape),
        latency_s_SS=np.zeros(shape),
        resources=("",) * stages**2,
        replicas_R=np.ones(stages * stages, np.int32),
    )
    found = simulate(interleaved(stages, microbatches, chunks), work)
    assert found.step_s == pytest.approx(3 * microbatches * chunks + 3 * (stages - 1))


def test_policies_move_the_step(setup: Setup) -> None:
    order, work, policy = candidate(setup, PLAN)
    step_s = simulate(order, work, policy).step_s
    late = policy.model_copy(update={"early_receive": False})
    assert simulate(order, work, late).step_s >= step_s
    exposed = policy.model_copy(update={"reduce_overlap": False})
    assert simulate(order, work, exposed).step_s >= step_s
    assert simulate(order, work, OverlapPolicy(buckets=10)).step_s <= step_s
    assert np.isfinite(step_s)
