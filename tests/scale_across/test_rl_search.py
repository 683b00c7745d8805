"""The search over role placements against brute force, and its prices against values worked by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.config import ConfigError
from common.messages import Routes
from common.spec import ClusterSpec, Link, Site
from scale_across.cli import app
from scale_across.rl_job import BROADCASTS, REDUCTIONS, RlJob, RlProfile, price, production
from scale_across.rl_search import explore_rl, ordered_placements

PROFILE = RlProfile(
    rollout_s=1.0,
    comparison_s=0.1,
    learner_s=0.5,
    sync_s=0.05,
    trajectory_bytes=2_000_000,
    shard_bytes=1_000_000,
    parameters=1_000_000,
)


def job(learner_ranks: int = 2, rollout_workers: int = 2, profile: RlProfile = PROFILE) -> RlJob:
    return RlJob(learner_ranks=learner_ranks, rollout_workers=rollout_workers, profile=profile)


def pair(gbps: float = 0.8, latency_us: float = 1000, gpus: tuple[int, int] = (4, 4)) -> ClusterSpec:
    sites = (Site(name="a", gpus=gpus[0]), Site(name="b", gpus=gpus[1]))
    return ClusterSpec(sites=sites, links=(Link(between=("a", "b"), bandwidth_gbps=gbps, latency_us=latency_us),))


def test_a_plan_is_priced_phase_by_phase() -> None:
    """0.8 Gb/s carry 100 MB/s; each figure below is bytes / 1e8 plus 1 ms of latency per round."""
    plan = price(Routes(pair()), job(), "by hand", ["a", "b"], ["b", "b"], "a", "ring", "star")
    step = plan.step
    assert step.trajectories_s == pytest.approx(0.020 + 0.001)  # 2 x 1 MB over one direction
    assert step.shards_s == pytest.approx(0.005 + 0.001)  # 0.5 MB to the rank at b
    assert step.gradients_s == pytest.approx(2 * (0.020 + 0.001))  # 2 rounds of 2 MB each way
    assert step.weight_sync_s == pytest.approx(0.05 + 0.080 + 0.001)  # star: 4 MB for each of two workers
    assert step.total_s == pytest.approx(1.6 + 0.021 + 0.006 + 0.042 + 0.131)
    assert step.network_s == pytest.approx(0.021 + 0.006 + 0.042 + 0.131)
    relay = price(Routes(pair()), job(), "by hand", ["a", "b"], ["b", "b"], "a", "ring", "relay")
    assert relay.step.weight_sync_s == pytest.approx(0.05 + 0.040 + 0.001)


def test_production_spreads_every_role_over_the_sites(three_sites: ClusterSpec) -> None:
    plan = production(Routes(three_sites), job(learner_ranks=3, rollout_workers=2))
    assert plan.learner == ("east-a", "east-b", "west")
    assert plan.rollout == ("east-a", "east-b")
    assert plan.comparison == "west"


def brute_force_s(cluster: ClusterSpec, wanted: RlJob) -> float:
    """The least step time over every assignment of every worker to every site, and all collectives."""
    routes, names = Routes(cluster), [site.name for site in cluster.sites]
    best_s = float("inf")
    workers = wanted.learner_ranks + wanted.rollout_workers + 1
    for word in itertools.product(names, repeat=workers):
        learner, rollout = word[: wanted.learner_ranks], word[wanted.learner_ranks : -1]
        for reduction, broadcast in itertools.product(REDUCTIONS, BROADCASTS):
            try:
                plan = price(routes, wanted, "x", learner, rollout, word[-1], reduction, broadcast)
            except ConfigError:
                continue
            best_s = min(best_s, plan.step.total_s)
    return best_s


def triangle(gpus: list[int], gbps: list[float], latency_us: list[float]) -> ClusterSpec:
    return ClusterSpec(
        sites=tuple(Site(name=f"s{i}", gpus=n) for i, n in enumerate(gpus)),
        links=tuple(
            Link(between=(f"s{i}", f"s{j}"), bandwidth_gbps=gbps[k], latency_us=latency_us[k])
            for k, (i, j) in enumerate(itertools.combinations(range(3), 2))
        ),
    )


CLUSTERS = st.builds(
    triangle,
    st.lists(st.integers(1, 4), min_size=3, max_size=3).filter(lambda gpus: sum(gpus) >= 5),
    st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    st.lists(st.floats(0, 50_000), min_size=3, max_size=3),
)


@settings(max_examples=15, deadline=None)
@given(CLUSTERS)
@example(triangle([1, 1, 3], [1.0, 1.0, 3.0], [0.0, 2.0, 1.0]))  # the order of equal rollout workers matters here
def test_the_search_finds_the_optimum_of_brute_force_and_proves_it(cluster: ClusterSpec) -> None:
    found = explore_rl(cluster, job())
    assert found.best.step.total_s == pytest.approx(brute_force_s(cluster, job()), rel=1e-9)
    assert found.gap == 0
    assert found.best.placement.shortages(cluster) == []
    assert all(found.speedup_over(plan) >= -1e-12 for plan in found.baselines)


def test_out_of_time_the_bound_still_holds() -> None:
    cluster = pair(gbps=0.01, gpus=(3, 3))
    cut_short, whole = explore_rl(cluster, job(), time_limit_s=0.0), explore_rl(cluster, job())
    assert cut_short.lower_bound_s <= whole.best.step.total_s <= cut_short.best.step.total_s
    assert cut_short.gap > 0


def test_a_space_too_large_to_finish_ends_in_time_with_a_plan_and_a_bound() -> None:
    """64 ranks and 64 rollout workers over five sites: hundreds of millions of placements, cut short at once."""
    sites = tuple(Site(name=f"s{i}", gpus=40) for i in range(5))
    links = tuple(
        Link(between=(a.name, b.name), bandwidth_gbps=1, latency_us=1000) for a, b in itertools.combinations(sites, 2)
    )
    found = explore_rl(ClusterSpec(sites=sites, links=links), job(64, 64), time_limit_s=0.5)
    assert 0 < found.lower_bound_s <= found.best.step.total_s
    assert found.best.placement.shortages(ClusterSpec(sites=sites, links=links)) == []


def test_placements_are_all_compositions_within_capacity() -> None:
    assert set(ordered_placements({"a": 2, "b": 1}, 2)) == {("a", "a"), ("a", "b"), ("b", "a")}
    assert list(ordered_placements({"a": 1, "b": 1}, 3)) == []


def test_a_job_larger_than_the_cluster_says_what_is_short() -> None:
    with pytest.raises(ConfigError, match=r"needs 11 GPUs .* has 8 \(a 4, b 4\): lower learner_ranks"):
        explore_rl(pair(), job(learner_ranks=8))


def test_another_layout_gives_another_plan() -> None:
    """Room for all at b: all roles go there. No room anywhere: the learners stay together."""
    roomy = explore_rl(pair(gpus=(2, 6)), job()).best
    assert set(roomy.placement.gpus_by_site()) == {"b"}
    tight = explore_rl(pair(gpus=(3, 2)), job()).best
    assert len(set(tight.learner)) == 1


def test_the_command_explores_files_and_reports_faults_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(pair().model_dump(mode="json")))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job().model_dump(mode="json")))
    files = [str(tmp_path / "cluster.yaml"), str(tmp_path / "job.yaml")]
    done = CliRunner().invoke(app, ["explore", *files, "--json", "--save", str(tmp_path / "plan.yaml")])
    assert done.exit_code == 0
    result = json.loads(done.output)
    assert result["gap"] == 0
    saved = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert saved["placement"] == result["best"]["placement"]
    unwritable = CliRunner().invoke(app, ["explore", *files, "--save", str(tmp_path / "no" / "plan.yaml")])
    assert "cannot be written" in str(unwritable.exception)
    broken = CliRunner().invoke(app, ["explore", *files, "--set", "sites.0.gpus=0"])
    assert isinstance(broken.exception, ConfigError)
    assert "sites.0.gpus" in str(broken.exception)
