"""The joint search: equal to exhaustive search by event simulation, bounded, deterministic, never behind a baseline."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from common.config import ConfigError
from common.spec import ClusterSpec
from scale_across.baselines import BASELINES, EXPLORER, Rules
from scale_across.crossing import TECHNOLOGIES
from scale_across.estimate import TrainingJob
from scale_across.explore import explore
from scale_across.judge import Judged, choice_of, judge
from scale_across.model import ModelShape
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism
from scale_across.shares import even_finish
from scale_across.space import Region, Space
from scale_across.space_kernel import BOUND_S, MEMORY_SHARE, bound_rows, with_shares
from scale_across.topology import Topology

SPACES = 30
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")
EVERYTHING = tuple(TECHNOLOGIES)


def cluster(
    gpus: list[int], gbps: float = 400.0, latency_us: float = 100.0, paths: int = 1, mixed: bool = False
) -> Topology:
    """A chain of sites; mixed: every second one has A100s."""
    sites = [
        {
            "name": f"s{i}", "gpus": count, "gpus_per_node": min(count, 8), "region": f"r{i // 2}",
            "accelerator": "a100-80g" if mixed and i % 2 else "h100-sxm",
        }
        for i, count in enumerate(gpus)
    ]  # fmt: skip
    links = [
        {"between": [f"s{i}", f"s{i + 1}"], "bandwidth_gbps": gbps, "latency_us": latency_us, "paths": paths}
        for i in range(len(gpus) - 1)
    ]
    return Topology.from_cluster(ClusterSpec.model_validate({"sites": sites, "links": links}))


def random_space(seed: int) -> tuple[ModelShape, Topology, TrainingJob]:
    """One to three unequal sites, links from slow to fast, a dense or a mixture-of-experts model."""
    draw = random.Random(seed)
    name = MODELS[seed % 5 == 0]  # experts make large spaces
    gpus = [draw.choice((8, 16, 24)) for _ in range(draw.randint(1, 2 if seed % 5 == 0 else 3))]
    paths = draw.choice((1, 16))
    topology = cluster(
        gpus, draw.choice((1.0, 10.0, 100.0, 3200.0)), draw.choice((10.0, 1e3, 3e4)), paths, seed % 3 == 1
    )
    job = TrainingJob(model=name, global_batch=draw.choice((16, 24, 48)), seq_len=draw.choice((2048, 4096, 8192)))
    return load_model(name), topology, job


def small_space(seed: int) -> tuple[ModelShape, Topology, TrainingJob]:
    """Few layers, few GPUs: every plan can be simulated."""
    draw = random.Random(1000 + seed)
    name = MODELS[seed % 10 == 0]
    whole = load_model(name)
    gpus = [2, 2] if seed % 5 else [4]
    model = replace(whole, layers=whole.layers[: 4 if len(gpus) == 1 else 2])
    topology = cluster(
        gpus, draw.choice((10.0, 100.0, 1600.0)), draw.choice((10.0, 1e3, 2e4)), draw.choice((1, 8)), seed % 4 == 1
    )
    return (
        model,
        topology,
        TrainingJob(model=name, global_batch=draw.choice((2, 3, 4)), seq_len=draw.choice((1024, 2048))),
    )


def whole_plans(region: Region, global_batch: int, rules: Rules) -> Iterator[Judged]:
    """Every plan of a region that fits and keeps the rules, simulated."""
    rows = with_shares(region, region.relaxed(), rules.technologies)
    if not rules.takes(region) or not len(rows):
        return
    rows = region.schedules(region.shardings(rows))
    rows = rows.take(np.flatnonzero(rules.keeps(rows, global_batch)))
    priced_NF = bound_rows(region, rows, rules.technologies)
    for index in np.flatnonzero(priced_NF[:, MEMORY_SHARE] <= 1.0):
        found = judge(choice_of(region, rows, index, rules.technologies))
        if found is not None:
            yield found


@pytest.mark.parametrize("seed", range(SPACES))
def test_equals_exhaustive_simulation(seed: int) -> None:
    model, topology, job = small_space(seed)
    found = explore(model, topology, job)
    regions = list(Space.of(model, topology, job).regions())
    for rules in (EXPLORER, BASELINES[seed % len(BASELINES)]):
        steps_s = [plan.step_s for region in regions for plan in whole_plans(region, job.global_batch, rules)]
        tuned = found.best if rules is EXPLORER else found.baseline(rules.name)
        assert (tuned.step_s if tuned else np.inf) == pytest.approx(min(steps_s, default=np.inf), rel=1e-12)
    assert found.gap == 0
    assert all(found.best.step_s <= plan.step_s for plan in found.baselines)


@pytest.mark.parametrize("seed", range(SPACES))
def test_bounds_hold(seed: int) -> None:
    """Down a random path of the tree each bound is no less than the one above, and the simulation no less than all."""
    model, topology, job = random_space(seed)
    draw = random.Random(seed)
    for region in Space.of(model, topology, job).regions():
        rows = with_shares(region, region.relaxed(), EVERYTHING)
        if not len(rows):
            continue
        above_s = region.least_s
        for refine in (lambda rows: rows, region.shardings, region.schedules):
            rows = refine(rows)
            bound_N = bound_rows(region, rows, EVERYTHING)[:, BOUND_S]
            assert (bound_N >= above_s * (1 - 1e-9)).all()
            index = draw.randrange(len(rows))
            rows, above_s = rows.take(slice(index, index + 1)), bound_N[index]
        simulated = judge(choice_of(region, rows, 0, EVERYTHING))
        assert simulated is None or simulated.step_s >= above_s * (1 - 1e-9)


def test_same_input_same_answer() -> None:
    first, again = (explore(*small_space(7)) for _ in range(2))
    assert (again.best.choice.parallelism, again.best.step_s) == (first.best.choice.parallelism, first.best.step_s)
    assert again.bounded == first.bounded
    assert [plan.describe() for plan in again.baselines] == [plan.describe() for plan in first.baselines]


@pytest.mark.parametrize("seed", range(0, SPACES, 6))
def test_the_winner_fits_its_sites_and_computes_the_batch(seed: int) -> None:
    model, topology, job = random_space(seed)
    found = explore(model, topology, job, tolerance=0.1)
    for plan in (found.best, *found.baselines):
        p, region = plan.choice.parallelism, plan.choice.region
        units = region.units(p)
        stages = region.crossing == "pp"
        size = p.tp * p.cp * (p.dp if stages else p.pp)
        assert sum(units.values()) == (p.pp if stages else p.dp)
        assert all(0 < count * size <= topology.spec.site(site).gpus for site, count in units.items())
        assert plan.judged.memory_bytes <= max(setup.gpu.memory_bytes for setup in region.setups)
        assert p.dp * p.microbatch <= job.global_batch or p.microbatch == 1


def test_a_site_behind_a_hopeless_link_is_left_out() -> None:
    job = TrainingJob(model="llama-3.1-8b", global_batch=16, seq_len=4096)
    topology = cluster([16, 8], gbps=0.01, latency_us=1e5)
    found = explore(load_model("llama-3.1-8b"), topology, job, tolerance=0.1)
    assert found.best.choice.region.left_out == ("s1",)
    assert "without s1" in found.best.describe()
    production = found.baseline("production")
    assert production is not None
    assert production.choice.region.left_out == ("s1",)  # the honest baseline leaves it out, too
    assert found.speedup_over(production) >= 0


def test_between_sites_all_gpus_share_the_link() -> None:
    """Two sites of 16 GPUs, 160 Gb/s: 16 flows of 10 Gb/s for a ring; a stage of 8 GPUs has 20 Gb/s each."""
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    space = Space.of(load_model("llama-3.1-8b"), cluster([16, 16], gbps=160.0), job)
    for region in space.regions():
        tiers = region.tiers((32, 8, False), EVERYTHING)
        reach = tiers[-1, 1] * 8e-9
        flow_gbps = {"dp": 10.0, "pp": 20.0}.get(region.crossing)
        if flow_gbps:
            assert 0.5 * flow_gbps < reach <= flow_gbps
            assert tiers[-1, 2] >= 100e-6
            assert tiers[-2, 0] == pytest.approx(16)


def test_technology_is_taken_where_it_helps() -> None:
    """Sixteen queue pairs hashed over sixteen paths collide; spraying does not. One path leaves nothing to win."""
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    model = load_model("llama-3.1-8b")
    region = next(iter(Space.of(model, cluster([16, 16], gbps=160.0, paths=16), job).regions()))
    hashed, best = region.crossing_of((32, 8, False), ("e-ecmp",)), region.crossing_of((32, 8, False), EVERYTHING)
    assert best.technology == "spray"
    assert best.slowest_bytes_per_s > 1.1 * hashed.slowest_bytes_per_s
    plain = next(iter(Space.of(model, cluster([16, 16], gbps=160.0), job).regions()))
    assert plain.crossing_of((32, 8, False), EVERYTHING).technology == "e-ecmp"


def test_slower_gpus_get_a_smaller_share() -> None:
    """H100 computes some 2.5 times as fast as A100; with equal shares the A100s would hold the H100s up."""
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    found = explore(load_model("llama-3.1-8b"), cluster([16, 16], gbps=3200.0, mixed=True), job, tolerance=0.02)
    production = found.baseline("production")
    assert production is not None
    slow, fast = found.best.choice.microbatches
    assert fast > 1.5 * slow
    assert found.speedup_over(production) > 0.2
    replicas = found.best.choice.region.replicas_of_kind(found.best.choice.parallelism)
    done = (slow * replicas[0] + fast * replicas[1]) * found.best.choice.parallelism.microbatch
    assert done >= job.global_batch


def test_even_finish_by_hand() -> None:
    """One replica of 1 s and one of 2 s a microbatch share nine: 6 and 3 both end at 6 s."""
    shares = even_finish(
        np.zeros((1, 2)), np.array([[1.0, 2.0]]), np.ones((1, 2), np.int64), np.array([9]), np.ones(1, np.int64)
    )
    assert shares.tolist() == [[6, 3]]


def test_units_follow_the_sizes_of_the_sites() -> None:
    job = TrainingJob(model="llama-3.1-8b", global_batch=64, seq_len=4096)
    region = next(iter(Space.of(load_model("llama-3.1-8b"), cluster([16, 48]), job).regions()))
    assert region.units(Parallelism(tp=8, dp=8)) == {"s0": 2, "s1": 6}
    assert region.units(Parallelism(tp=8, dp=7)) == {"s0": 1, "s1": 6}


def test_out_of_time_there_is_a_plan_and_the_bound_holds() -> None:
    model, topology, job = small_space(4)
    cut, whole = explore(model, topology, job, time_limit_s=0.0), explore(model, topology, job)
    assert cut.lower_bound_s <= whole.best.step_s <= cut.best.step_s


def test_a_tolerance_ends_the_search_within_it() -> None:
    model, topology, job = small_space(3)
    loose, whole = explore(model, topology, job, tolerance=0.05), explore(model, topology, job)
    assert loose.gap <= 0.05 / 0.95
    assert whole.best.step_s <= loose.best.step_s
    assert len(loose.simulated) <= len(whole.simulated)


def test_out_of_memory_is_told() -> None:
    job = TrainingJob(model="llama-3.1-405b", global_batch=8, seq_len=4096)
    with pytest.raises(ConfigError, match="exceed the GPUs' memory"):
        explore(load_model("llama-3.1-405b"), cluster([8]), job)
    with pytest.raises(ConfigError, match="at most 6"):
        explore(load_model("llama-3.1-405b"), cluster([8] * 7), job)


def test_an_interrupt_returns_the_plan_so_far_with_a_bound_that_holds() -> None:
    model, topology, job = small_space(3)
    whole = explore(model, topology, job)

    def stop(kind: str, best_s: float, bound_s: float) -> None:
        if best_s < np.inf:
            raise KeyboardInterrupt

    cut = explore(model, topology, job, progress=stop)
    assert cut.lower_bound_s <= whole.best.step_s <= cut.best.step_s
