"""Estimate candidates: what a training job costs on a cluster under one parallelism, or under a million.

    setup = Setup.of(model, cluster, job)         # plain numbers, once per model, cluster and job
    one = setup.estimate(Parallelism(tp=8, pp=16, dp=64, chunks=8, sp=1, zero=1))
    many_NF = setup.estimate_batch(candidates(tp=..., pp=..., ...))     # columns: COLUMNS

Both run the same formulas (`step.py`), the second compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from common.config import Config
from scale_across import hardware
from scale_across.collectives import Tiers, outer_tier
from scale_across.compute import GpuNumbers, Kinds, StackNumbers
from scale_across.hardware import Accelerator
from scale_across.jit import compiled
from scale_across.model import ModelShape, Moe, layer_parameters
from scale_across.parallelism import DP_OUTERMOST, Parallelism, check
from scale_across.stack import Stack
from scale_across.stack import stack as stack_named
from scale_across.step import Estimate, JobNumbers, ModelNumbers, estimate_row
from scale_across.topology import Topology
from scale_across.traffic import expert_stride

COLUMNS = Estimate._fields


class TrainingJob(Config):
    """What is trained, apart from how it is split."""

    kind: Literal["training"] = "training"
    model: str
    """A preset's name or a Hugging Face config.json."""
    global_batch: int = Field(gt=0)
    """Sequences per step."""
    seq_len: int = Field(gt=0)
    dtype: str = "bf16"
    stack: str = "megatron-2024"
    gradient_bytes: float = Field(default=4.0, gt=0)
    """Per parameter, as kept between microbatches."""
    optimizer_bytes: float = Field(default=12.0, ge=0)
    """Per parameter: master copy and moments."""
    compute_share: float = Field(default=1.0, gt=0, le=1)
    """Of the calibrated rates of GPUs and their memory; below 1 to ask how a plan fares on slower ones."""


@dataclass(frozen=True)
class Setup:
    """A model, a cluster and a job as the numbers that the formulas take."""

    model: ModelShape
    kinds_KF: Kinds
    model_numbers: ModelNumbers
    gpu: GpuNumbers
    stack: StackNumbers
    tiers_TF: Tiers
    tier_names: tuple[str, ...]
    job: JobNumbers

    @classmethod
    def of(cls, model: ModelShape, topology: Topology, job: TrainingJob) -> Setup:
        """Combine the parts. Over mixed accelerators each number is the slowest's, since all ranks wait for it.

        Raises:
            ConfigError: an unknown accelerator or stack, or a dtype that one of the accelerators lacks.
        """
        kinds = [hardware.accelerator(name) for name in sorted({site.accelerator for site in topology.spec.sites})]
        names = tuple(name for name, *_ in topology.tier_table())
        return cls.from_parts(model, kinds, stack_named(job.stack), cluster_tiers(topology, kinds), job, names)

    @classmethod
    def from_parts(
        cls,
        model: ModelShape,
        accelerators: list[Accelerator],
        chosen: Stack,
        tiers_TF: Tiers,
        job: TrainingJob,
        tier_names: tuple[str, ...] = (),
    ) -> Setup:
        """As `of`, with the network given as tiers of reachable bandwidth."""
        kinds_KF, numbers = model_numbers(model, job.seq_len)
        return cls(
            model=model,
            kinds_KF=kinds_KF,
            model_numbers=numbers,
            gpu=slowed(slowest([accelerator.numbers(job.dtype) for accelerator in accelerators]), job.compute_share),
            stack=chosen.numbers(),
            tiers_TF=tiers_TF,
            tier_names=tier_names or tuple(f"tier {index}" for index in range(len(tiers_TF))),
            job=JobNumbers(
                float(job.global_batch),
                float(job.seq_len),
                gradient_bytes=job.gradient_bytes,
                optimizer_bytes=job.optimizer_bytes,
            ),
        )

    def check(self, plan: Parallelism, gpus: int) -> None:
        """Raise ConfigError when the plan does not divide the model, the batch or the cluster."""
        check(plan, self.model, gpus=gpus, global_batch=int(self.job.global_batch), seq_len=int(self.job.seq))

    def estimate(self, plan: Parallelism) -> Estimate:
        """One candidate, in plain Python (some 0.2 ms). Degrees that do not divide are not noticed: see `check`."""
        return estimate_row(plan, self.kinds_KF, self.model_numbers, self.gpu, self.stack, self.tiers_TF, self.job)

    def exposed_by_tier(self, plan: Parallelism, estimate: Estimate) -> dict[str, float]:
        """Exposed communication in seconds by the outermost tier that each axis crosses, innermost tier first."""
        inner = plan.tp * plan.cp
        dp_stride = inner * (plan.pp if plan.order == DP_OUTERMOST else 1)
        pp_stride = inner * (1 if plan.order == DP_OUTERMOST else plan.dp)
        spans = (
            (estimate.tp_s, plan.tp, 1),
            (estimate.cp_s, plan.cp, plan.tp),
            (estimate.ep_s, plan.ep, int(expert_stride(plan))),
            (estimate.dp_s, plan.dp, dp_stride),
            (estimate.pp_s, plan.pp, pp_stride),
        )
        found = dict.fromkeys(self.tier_names, 0.0)
        for seconds, size, stride in spans:
            found[self.tier_names[outer_tier(self.tiers_TF, size, stride)]] += float(seconds)
        return {tier: seconds for tier, seconds in found.items() if seconds > 0}

    def estimate_batch(self, plans_NF: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """[N, len(COLUMNS)] for candidates with the columns of `Parallelism`; compiled on first use (some 10 s)."""
        out_NF = np.empty((len(plans_NF), len(COLUMNS)))
        _batch_kernel()(
            np.ascontiguousarray(plans_NF, np.int64),
            self.kinds_KF,
            self.model_numbers,
            self.gpu,
            self.stack,
            self.tiers_TF,
            self.job,
            out_NF,
        )
        return out_NF


def slowest(numbers: list[GpuNumbers]) -> GpuNumbers:
    """The least of every rate and size, and the most of every overhead."""
    worse = [max if name in ("gemm_k0", "gap_s") else min for name in GpuNumbers._fields]
    return GpuNumbers(*(pick(values) for pick, values in zip(worse, zip(*numbers, strict=True), strict=True)))


def slowed(gpu: GpuNumbers, share: float) -> GpuNumbers:
    """The same GPU at a share of its rates."""
    return gpu._replace(flops=gpu.flops * share, bytes_per_s=gpu.bytes_per_s * share)


def cluster_tiers(topology: Topology, accelerators: list[Accelerator]) -> Tiers:
    """The topology's tier table at the bandwidths that collectives reach: the node's fabric, and all else, apart."""
    fabric = min(accelerator.calibration.fabric_fraction for accelerator in accelerators)
    network = min(accelerator.calibration.network_fraction for accelerator in accelerators)
    rows = [
        [gpus, bytes_per_s * (fabric if index == 0 else network), latency_s]
        for index, (_, gpus, bytes_per_s, latency_s) in enumerate(topology.tier_table())
    ]
    return np.array(rows, np.float64)


def model_numbers(model: ModelShape, seq_len: int) -> tuple[Kinds, ModelNumbers]:
    """A model shape as the arrays and numbers that the formulas take."""
    rows = []
    for layer, count in model.kinds():
        a, ffn = layer.attention, layer.ffn
        counts = layer_parameters(model.hidden, layer)
        experts, top_k, shared = (ffn.experts, ffn.top_k, ffn.shared_width) if isinstance(ffn, Moe) else (0, 0, 0)
        attention = (a.heads, a.kv_heads, a.head_dim, a.value_dim, a.q_lora_rank, a.kv_lora_rank, a.rope_head_dim)
        feed_forward = (ffn.width, ffn.gated, experts, top_k, shared)
        rows.append(
            (count, *attention, a.window, *feed_forward, counts.tensor, counts.expert, counts.replicated, a.chunked)
        )
    flops = model.flops(seq_len).model
    table = float(model.vocab * model.hidden)
    numbers = ModelNumbers(
        hidden=float(model.hidden),
        vocab=float(model.vocab),
        layers=float(len(model.layers)),
        embedding_params=table,
        head_params=0.0 if model.tied_embeddings else table,
        flops_per_token=flops.linear / seq_len,
        attention_flops_per_token=flops.attention / seq_len,
        causal_flops_per_token=flops.causal_attention / seq_len,
    )
    return np.array(rows, np.float64), numbers


@lru_cache(maxsize=1)
def _batch_kernel() -> Callable[..., None]:
    def make(digest: str) -> Callable[..., None]:
        def kernel(plans_NF, kinds_KF, model, gpu, stack, tiers_TF, job, out_NF):  # type: ignore[no-untyped-def]
            _ = digest  # part of the key of the disk cache
            for i in range(len(plans_NF)):
                row = plans_NF[i]
                plan = Parallelism(
                    row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11],
                    row[12], row[13],
                )  # fmt: skip
                result = estimate_row(plan, kinds_KF, model, gpu, stack, tiers_TF, job)
                for j in range(len(result)):
                    out_NF[i, j] = result[j]

        return kernel

    return compiled(make)
