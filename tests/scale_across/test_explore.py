"""The joint search for training jobs: equal to exhaustive search, bounded, deterministic, never behind a baseline."""

from __future__ import annotations

import random

import numpy as np
import pytest

from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.baselines import BASELINES
from scale_across.estimate import TrainingJob
from scale_across.explore import explore
from scale_across.model import ModelShape
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism
from scale_across.space import Space
from scale_across.space_kernel import BOUND_S, MEMORY_BYTES, TOTAL_S, price_rows
from scale_across.topology import Topology

SPACES = 30
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")


def cluster(gpus: list[int], gbps: float = 400.0, latency_us: float = 100.0) -> Topology:
    """A chain of sites."""
    sites = [{"name": f"s{i}", "gpus": count, "region": f"r{i // 2}"} for i, count in enumerate(gpus)]
    links = [
        {"between": [f"s{i}", f"s{i + 1}"], "bandwidth_gbps": gbps, "latency_us": latency_us}
        for i in range(len(gpus) - 1)
    ]
    return Topology.from_cluster(ClusterSpec.model_validate({"sites": sites, "links": links}))


def random_space(seed: int) -> tuple[ModelShape, Topology, TrainingJob]:
    """One to three unequal sites, links from slow to fast, a dense or a mixture-of-experts model."""
    draw = random.Random(seed)
    name = MODELS[seed % 5 == 0]  # experts make large spaces
    gpus = [draw.choice((8, 16, 24)) for _ in range(draw.randint(1, 2 if seed % 5 == 0 else 3))]
    topology = cluster(gpus, draw.choice((1.0, 10.0, 100.0, 3200.0)), draw.choice((10.0, 1e3, 3e4)))
    job = TrainingJob(model=name, global_batch=draw.choice((16, 24, 48)), seq_len=draw.choice((2048, 4096)))
    return load_model(name), topology, job


@pytest.mark.parametrize("seed", range(SPACES))
def test_equals_exhaustive_search(seed: int) -> None:
    model, topology, job = random_space(seed)
    found = explore(model, topology, job)
    production = BASELINES[0]
    best_s = production_s = np.inf
    for region in Space.of(model, topology, job).regions():
        relaxed = region.relaxed()
        rows = relaxed.expand()
        if not len(rows):
            continue
        priced_NF = price_rows(region.setup, rows)
        fits_N = priced_NF[:, MEMORY_BYTES] <= region.setup.gpu.memory_bytes
        best_s = min(best_s, priced_NF[fits_N, TOTAL_S].min(initial=np.inf))
        if production.takes(region):
            fits_N &= production.keeps(rows.plans_NF, rows.batch_N, job.global_batch)
            production_s = min(production_s, priced_NF[fits_N, TOTAL_S].min(initial=np.inf))
        bound_N = np.repeat(price_rows(region.setup, relaxed)[:, BOUND_S], len(rows) // len(relaxed))
        assert np.all(bound_N <= priced_NF[:, TOTAL_S] * (1 + 1e-12))
    assert found.best.step_s == pytest.approx(best_s, rel=1e-12)
    assert found.gap == 0
    tuned = {plan.name: plan.step_s for plan in found.baselines}
    assert tuned.get("production", np.inf) == pytest.approx(production_s, rel=1e-12)
    assert all(found.best.step_s <= plan.step_s for plan in found.baselines)


def test_same_input_same_answer() -> None:
    first, again = (explore(*random_space(7)) for _ in range(2))
    assert (again.best.to_dict(), again.priced) == (first.best.to_dict(), first.priced)
    assert [plan.to_dict() for plan in again.baselines] == [plan.to_dict() for plan in first.baselines]


@pytest.mark.parametrize("seed", range(0, SPACES, 6))
def test_the_winner_fits_its_sites_and_computes_the_batch(seed: int) -> None:
    model, topology, job = random_space(seed)
    found = explore(model, topology, job)
    for plan in (found.best, *found.baselines):
        p = plan.parallelism
        units = plan.region.units(p)
        stages = plan.region.crossing == "pp"
        size = p.tp * p.cp * (p.dp if stages else p.pp)
        assert sum(units.values()) == (p.pp if stages else p.dp)
        assert all(0 < count * size <= topology.spec.site(site).gpus for site, count in units.items())
        assert plan.estimate.memory_bytes <= plan.region.setup.gpu.memory_bytes
        assert p.dp * p.microbatch <= job.global_batch or p.microbatch == 1


def test_a_site_behind_a_hopeless_link_is_left_out() -> None:
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    found = explore(load_model("llama-3.1-8b"), cluster([64, 8], gbps=0.01, latency_us=1e5), job)
    assert found.best.region.left_out == ("s1",)
    assert "without s1" in found.best.describe()
    production = next(plan for plan in found.baselines if plan.name == "production")
    assert found.speedup_over(production) > 1


def test_between_sites_all_gpus_share_the_link() -> None:
    """Two sites of 16 GPUs, 160 Gb/s: 16 flows of 10 Gb/s for a ring; a stage of 8 GPUs has 20 Gb/s each."""
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    space = Space.of(load_model("llama-3.1-8b"), cluster([16, 16], gbps=160.0), job)
    for region in space.regions():
        tiers = region.tiers(32, 8, 1)
        reach = region.tiers(32, 8, 1)[-1, 1] * 8e-9
        flow_gbps = {"dp": 10.0, "pp": 20.0}.get(region.crossing)
        if flow_gbps:
            assert 0.5 * flow_gbps < reach <= flow_gbps
            assert tiers[-1, 2] >= 100e-6
            assert tiers[-2, 0] == pytest.approx(16)


def test_units_follow_the_sizes_of_the_sites() -> None:
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    region = next(iter(Space.of(load_model("llama-3.1-8b"), cluster([16, 48]), job).regions()))
    assert region.units(Parallelism(tp=8, dp=8)) == {"s0": 2, "s1": 6}
    assert region.units(Parallelism(tp=8, dp=7)) == {"s0": 1, "s1": 6}


def test_out_of_time_there_is_a_plan_and_the_bound_holds() -> None:
    model, topology, job = random_space(4)
    cut, whole = explore(model, topology, job, time_limit_s=0.0), explore(model, topology, job)
    assert cut.lower_bound_s <= whole.best.step_s <= cut.best.step_s


def test_out_of_memory_is_told() -> None:
    job = TrainingJob(model="llama-3.1-405b", global_batch=8, seq_len=4096)
    with pytest.raises(ConfigError, match="exceed the GPUs' memory"):
        explore(load_model("llama-3.1-405b"), cluster([8]), job)
    with pytest.raises(ConfigError, match="at most 6"):
        explore(load_model("llama-3.1-405b"), cluster([8] * 7), job)


def test_an_interrupt_returns_the_plan_so_far_with_a_bound_that_holds() -> None:
    model, topology, job = random_space(3)
    whole = explore(model, topology, job)

    def stop(kind: str, best_s: float, bound_s: float) -> None:
        if best_s < np.inf:
            raise KeyboardInterrupt

    cut = explore(model, topology, job, progress=stop)
    assert cut.lower_bound_s <= whole.best.step_s <= cut.best.step_s
