"""Two published cross-site settings, simulated: is the direction right, and the size?

    .venv/bin/python experiments/cross_site_check.py

1. CrossPipe's simulation of Llama 3 405B (TP 8, PP 16, DP 64, sequence 8,192, forward 109 ms per stage and microbatch),
   two sites: pipeline across sites against data parallelism across sites, by total bandwidth between the sites.
   Published: up to 3.05x at 4 GB/s; 1.3x slower than one site at 64 GB/s; parity above 1,024 GB/s; 4-128 ms hardly
   matter. Not published: what shares the bandwidth, how large messages are, how many microbatches. Reading taken here:
   the bandwidth is that of all traffic between the sites in one direction; a microbatch's activations cross once, in
   bf16 (268 MB, divided over the tensor ranks); gradients cross once each way in fp32; 2,048 sequences per step, so 32
   microbatches.
2. NeMo on Nemotron-4 340B over two sites 1,000 km apart (21 ms round trip), 3,072 GPUs: 96 % of one site. Setting of
   the model's report: TP 8, PP 12, 8 chunks, batch 1,536. Not published: the bandwidth between the sites, so it is
   varied; gradients are reduce-scattered inside, all-reduced across and the parameters gathered inside, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.spec import ClusterSpec, Site
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import Parallelism
from scale_across.schedules_static import interleaved
from scale_across.simulate import Phase, Work, simulate
from scale_across.simulate_input import candidate
from scale_across.topology import Topology

STAGES, REPLICAS, MICROBATCHES, FORWARD_S = 16, 64, 32, 0.109
MESSAGE_BYTES, PARAMETERS = 8192 * 16384 * 2.0, 405e9


def llama(
    gbytes_per_s: float, latency_s: float, across: str, stagger: int = 1, bytes_per_gradient: float = 4.0
) -> float:
    """Step seconds with `pipeline`, `data` or nothing (`one site`) across two sites joined by one link."""
    shape = (STAGES, STAGES)
    resource_SS = np.arange(STAGES * STAGES, dtype=np.int32).reshape(shape)
    occupied_SS, latency_SS = np.zeros(shape), np.zeros(shape)
    replicas_R = np.ones(STAGES * STAGES, np.int32)
    middle = STAGES // 2
    reduce_S: tuple[tuple[Phase, ...], ...] = ()
    if across == "pipeline":
        occupied_SS[middle - 1, middle] = occupied_SS[middle, middle - 1] = MESSAGE_BYTES / (gbytes_per_s * 1e9)
        latency_SS[middle - 1, middle] = latency_SS[middle, middle - 1] = latency_s
        replicas_R[[resource_SS[middle - 1, middle], resource_SS[middle, middle - 1]]] = REPLICAS
    elif across == "data":
        leg_s = PARAMETERS / STAGES * bytes_per_gradient / (gbytes_per_s * 1e9)
        reduce_S = ((Phase(0, leg_s, 2 * latency_s),),) * STAGES  # one link for all stages
    times = np.array([FORWARD_S, FORWARD_S, FORWARD_S, 2 * FORWARD_S])
    work = Work(
        np.tile(times[:, None], (1, STAGES)),
        resource_SS,
        occupied_SS,
        latency_SS,
        ("",) * STAGES**2,
        replicas_R,
        reduce_S,
    )
    return simulate(interleaved(STAGES, MICROBATCHES, 1), work, OverlapPolicy(buckets=8, stagger=stagger)).step_s


def nemotron(gbytes_per_s: float | None, rtt_s: float = 0.021) -> float:
    """Step seconds on one site (None) or on two with that bandwidth between them."""
    job = TrainingJob(model="nemotron-4-340b", global_batch=1536, seq_len=4096)
    topology = Topology.from_cluster(ClusterSpec(sites=(Site(name="a", gpus=3072),)))
    setup = Setup.of(load_model(job.model), topology, job)
    plan = Parallelism(tp=8, pp=12, dp=32, chunks=8, sp=1, zero=1)
    order, work, policy = candidate(setup, plan)
    if gbytes_per_s is None:
        return simulate(order, work, policy).step_s
    link = len(work.resources)
    chunk = setup.model.parameters / (plan.pp * plan.chunks)
    leg = Phase(link, chunk * 4.0 / (gbytes_per_s * 1e9), rtt_s)
    work = replace(
        work,
        resources=(*work.resources, "site link"),
        replicas_R=np.append(work.replicas_R, 1).astype(np.int32),
        reduce_S=tuple((*legs, leg) for legs in work.reduce_S),
    )
    return simulate(order, work, policy).step_s


def main() -> None:
    """Print both settings."""
    one = llama(1, 0, "one site")
    print(f"Llama 3 405B, one site: {one:.2f} s")
    print("GB/s  latency_ms  pipeline_s  turns_s  data_s  data/pipeline  bf16_data/pipeline  pipeline/one_site")
    for gbytes_per_s in (4, 16, 64, 256, 1024, 4096):
        for latency_s in (0.004, 0.128):
            pipeline = llama(gbytes_per_s, latency_s, "pipeline")
            turns = llama(gbytes_per_s, latency_s, "pipeline", stagger=REPLICAS)
            data = llama(gbytes_per_s, latency_s, "data")
            half = llama(gbytes_per_s, latency_s, "data", bytes_per_gradient=2.0)
            best = min(pipeline, turns)
            print(
                f"{gbytes_per_s:4d}  {latency_s * 1e3:10.0f}  {pipeline:10.2f}  {turns:7.2f}  {data:6.2f}  "
                f"{data / best:13.2f}  {half / best:18.2f}  {best / one:17.2f}"
            )
    single = nemotron(None)
    print(f"\nNemotron-4 340B, 3,072 GPUs, one site: {single:.2f} s")
    for gbytes_per_s in (50, 100, 200, 400, 800, 1600):
        print(f"{gbytes_per_s:5d} GB/s between two sites: {single / nemotron(gbytes_per_s):.1%} of one site")


if __name__ == "__main__":
    main()
