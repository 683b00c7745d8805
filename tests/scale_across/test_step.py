"""The step model against values worked by hand, and what must hold for every candidate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from common.spec import ClusterSpec, Link, Site
from scale_across.compute import COUNT, GpuNumbers, StackNumbers, gemm_s, layer_gemms_s, mean_keys
from scale_across.estimate import COLUMNS, Setup, TrainingJob
from scale_across.hardware import accelerator, names
from scale_across.memory import held_microbatch_layers
from scale_across.model import gpt, projections
from scale_across.model_presets import load_model
from scale_across.parallelism import Parallelism, candidates
from scale_across.stack import names as stack_names
from scale_across.stack import stack
from scale_across.topology import Topology
from scale_across.traffic import boundary_s, expert_stride, split_layers, stalled_s

PARTS = ("compute_s", "bubble_s", "tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "optimizer_s")
GPU = GpuNumbers(1e14, 1e12, 100.0, 80 * 2.0**30, 1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0)
"""100 TFLOP/s on 100 multiprocessors, 1 TB/s, no losses."""


def two_sites(gbps: float = 1600, latency_us: float = 1000) -> Topology:
    sites = (Site(name="a", gpus=64), Site(name="b", gpus=64))
    return Topology.from_cluster(
        ClusterSpec(sites=sites, links=(Link(between=("a", "b"), bandwidth_gbps=gbps, latency_us=latency_us),))
    )


def setup(model: str = "llama-3.1-8b", topology: Topology | None = None, **job: object) -> Setup:
    settings = {"model": model, "global_batch": 256, "seq_len": 4096, **job}
    return Setup.of(load_model(model), topology or two_sites(), TrainingJob.model_validate(settings))


def test_a_gemm_is_bound_by_waves_or_by_memory() -> None:
    """1280 x 1280 x 1000: 100 tiles fill 100 multiprocessors once; one more row of tiles costs a whole wave."""
    wave_s = 2 * 1280 * 1280 * 1000 / 1e14
    assert gemm_s(GPU, 1.0, 1280.0, 1280.0, 1000.0, 2.0) == pytest.approx(wave_s)
    assert gemm_s(GPU, 1.0, 1288.0, 1280.0, 1000.0, 2.0) == pytest.approx(2 * wave_s)
    assert gemm_s(GPU, 1.0, 1280.0, 1280.0, 1001.0, 2.0) == pytest.approx(wave_s * 1.001 / 0.5)  # unaligned
    thin = 2 * (8 * 8192 + 8192 * 8192) + 2 * 8 * 8192
    slow_memory = GPU._replace(bytes_per_s=1e11)
    assert gemm_s(slow_memory, 1.0, 8.0, 8192.0, 8192.0, 2.0) == pytest.approx(thin / 1e11)


def test_keys_per_query() -> None:
    assert mean_keys(8.0, 0.0, 0.0) == 4
    assert mean_keys(8.0, 2.0, 0.0) == 2 - 4 / 16
    assert mean_keys(8.0, 2.0, 1.0) == 1


def test_stages_of_llama_3_leave_room_for_embedding_and_head() -> None:
    assert split_layers(126.0, 16.0, 8.0) == (7, 8, 7, 1)
    assert split_layers(48.0, 4.0, 2.0) == (12, 12, 12, 6)
    assert split_layers(32.0, 1.0, 1.0).middle == 32


def test_boundaries_between_stages_cross_the_tier_that_separates_them() -> None:
    """8 stages of 8 GPUs in 2 sites of 32: 6 boundaries inside a site, one between."""
    tiers = np.array([[8, 1e11, 0.0], [32, 1e10, 0.0], [64, 1e9, 1.0]])
    worst_s, total_s = boundary_s(tiers, 1e9, 8.0, 8)
    assert worst_s == pytest.approx(2.0)
    assert total_s == pytest.approx(6 * 0.1 + 2.0)


def test_host_and_gpu_stall_each_other() -> None:
    assert stalled_s(3.0, 4.0) == pytest.approx(5.0)


def test_held_activations_of_1f1b_and_interleaving() -> None:
    assert held_microbatch_layers(4.0, 8.0, 1.0, 32.0) == 32
    assert held_microbatch_layers(2.0, 8.0, 2.0, 32.0) == 2 * (16 + 7)
    assert held_microbatch_layers(4.0, 8.0, 1.0, 2.0) == 8


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "llama-4-maverick", "gpt-3-175b"])
def test_gemms_do_the_work_that_the_model_counts(name: str) -> None:
    """Without overheads, GEMM seconds x peak are the FLOPs of `model.projections`, router and gates apart."""
    shape = load_model(name)
    chosen = setup(name, seq_len=1024)
    ideal = GPU._replace(sms=1.0, bytes_per_s=1e30, unaligned_fraction=1.0)
    for row, (layer, _) in zip(chosen.kinds_KF, shape.kinds(), strict=True):
        tokens = 128.0 * 512  # whole tiles also for an expert's share
        forward_s, input_s, weight_s, _ = layer_gemms_s(ideal, chosen.stack, row, float(shape.hidden), tokens, 1, 1, 1)
        counted = [p for p in projections(shape.hidden, layer) if p.name != "router" and p.outer > 1]
        flops = tokens * sum(p.flops_per_token for p in counted)
        for seconds in (forward_s, input_s, weight_s):
            assert flops <= seconds * 1e14 * (1 + 1e-9)
            assert seconds * 1e14 == pytest.approx(flops, rel=0.04)  # widths that are no multiple of a tile


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_splitting_over_tensor_ranks_conserves_work_and_parameters(degree: int) -> None:
    chosen, ideal = setup("gpt-3-175b"), GPU._replace(sms=1.0, bytes_per_s=1e30)
    row = chosen.kinds_KF[0]
    whole = layer_gemms_s(ideal, chosen.stack, row, 12288.0, 4096.0, 1.0, 1.0, 1.0)
    part = layer_gemms_s(ideal, chosen.stack, row, 12288.0, 4096.0, float(degree), 1.0, 1.0)
    assert [degree * s for s in part[:3]] == pytest.approx(list(whole[:3]))
    plans = [Parallelism(tp=degree, pp=p, dp=1, zero=0) for p in (1, 2)]
    bytes_of = [chosen.estimate(plan).parameters_bytes for plan in plans]
    assert bytes_of[0] * degree == pytest.approx(2 * (chosen.model.parameters), rel=2e-3)  # norms are not split


def test_parts_add_up_and_both_speeds_agree() -> None:
    for name in ("llama-3.1-8b", "llama-4-maverick"):
        chosen = setup(name)
        rng = np.random.default_rng(0)
        count = 300
        plans_NF = candidates(
            tp=rng.choice([1, 2, 4, 8], count), cp=rng.choice([1, 2], count), pp=rng.choice([1, 2, 4], count),
            dp=rng.choice([1, 4, 8], count), chunks=rng.choice([1, 2], count), microbatch=rng.choice([1, 2], count),
            zero=rng.choice(4, count), recompute=rng.choice(3, count), sp=rng.choice(2, count),
            order=rng.choice(2, count), reduction=rng.choice(2, count),
        )  # fmt: skip
        batch_NF = chosen.estimate_batch(plans_NF)
        column = {name: batch_NF[:, index] for index, name in enumerate(COLUMNS)}
        assert sum(column[part] for part in PARTS) == pytest.approx(column["total_s"])
        assert (column["bound_s"] <= column["total_s"]).all()
        assert (batch_NF >= 0).all()
        for index in range(0, count, 30):
            one = chosen.estimate(Parallelism(*map(int, plans_NF[index])))
            assert batch_NF[index] == pytest.approx(list(one))
            tiers_s = chosen.exposed_by_tier(Parallelism(*map(int, plans_NF[index])), one)
            assert sum(tiers_s.values()) == pytest.approx(one.tp_s + one.cp_s + one.ep_s + one.pp_s + one.dp_s)


CHOICES = {
    "tp": [1, 2, 8], "cp": [1, 2], "ep": [1], "etp": [1], "pp": [1, 2, 4], "dp": [1, 4, 8], "chunks": [1, 2],
    "microbatch": [1, 2], "zero": [0, 1, 2, 3], "shard": [0], "recompute": [0, 1, 2], "sp": [0, 1], "order": [0, 1],
    "reduction": [0, 1],
}  # fmt: skip
PLANS = st.builds(Parallelism, **{name: st.sampled_from(values) for name, values in CHOICES.items()})


@settings(max_examples=30, deadline=None)
@given(
    PLANS,
    st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "gpt2-xl"]),
    st.sampled_from(stack_names()),
    st.floats(1, 5000),
    st.floats(0, 1e5),
    st.floats(1, 4),
)
def test_a_better_machine_never_slows_a_step(
    plan: Parallelism, model: str, software: str, gbps: float, latency_us: float, factor: float
) -> None:
    plan = plan._replace(ep=8 if model == "mixtral-8x7b" and plan.dp == 8 else 1)
    base = setup(model, two_sites(gbps, latency_us), stack=software)
    before = base.estimate(plan).total_s
    assert base.estimate(plan).bound_s <= before
    better = [
        setup(model, two_sites(gbps * factor, latency_us), stack=software),
        setup(model, two_sites(gbps, latency_us / factor), stack=software),
    ]
    times_s = [other.estimate(plan).total_s for other in better]
    for field in ("flops", "bytes_per_s"):
        faster = GpuNumbers(**{**base.gpu._asdict(), field: getattr(base.gpu, field) * factor})
        times_s.append(Setup(**{**vars(base), "gpu": faster}).estimate(plan).total_s)
    assert max(times_s) <= before * (1 + 1e-9)


def test_every_accelerator_and_stack_loads() -> None:
    wanted = [
        "v100",
        "a100-40g",
        "a100-80g",
        "h100-sxm",
        "h100-96g",
        "h200",
        "h800",
        "gh200",
        "b200",
        "gb200",
        "mi300x",
        "cpu-core",
    ]
    assert set(wanted) <= set(names())
    assert all(accelerator(name).numbers(next(iter(accelerator(name).peak_tflops))).flops > 0 for name in names())
    assert all(isinstance(stack(name).numbers(), StackNumbers) for name in stack_names())
    with pytest.raises(ConfigError, match=r"dtype 'fp8': a100-80g computes in bf16, fp16, fp32, tf32"):
        accelerator("a100-80g").numbers("fp8")
    with pytest.raises(ConfigError, match="accelerator 'a200' is unknown; known are a100-40g"):
        accelerator("a200")


def test_mixed_accelerators_go_at_the_pace_of_the_slowest() -> None:
    def cluster(other: str) -> Topology:
        sites = (Site(name="a", gpus=8), Site(name="b", gpus=8, accelerator=other))
        link = Link(between=("a", "b"), bandwidth_gbps=400, latency_us=10)
        return Topology.from_cluster(ClusterSpec(sites=sites, links=(link,)))

    plan = Parallelism(tp=8, dp=2, sp=1)
    same, mixed = (setup(topology=cluster(kind)).estimate(plan).total_s for kind in ("h100-sxm", "a100-80g"))
    assert mixed > 1.5 * same


def test_an_expert_group_reaches_across_the_pipeline_when_dp_is_outermost() -> None:
    assert expert_stride(Parallelism(tp=4, etp=4, ep=8, dp=8, pp=4, order=1)) == 16
    assert expert_stride(Parallelism(tp=4, etp=4, ep=8, dp=8, pp=4, order=0)) == 4
    assert expert_stride(Parallelism(tp=8, etp=1, ep=8, dp=8, pp=4, order=1)) == 1  # inside the tensor ranks


def test_gpt_rows_have_the_published_size() -> None:
    assert setup("gpt-3-175b").kinds_KF[0][COUNT] == 96
    assert gpt(96, 12288, 96).parameters == pytest.approx(175e9, rel=0.01)
