"""The search space that takes Calculon 24 CPU-minutes, solved here, with Calculon's own optimum beside it.

GPT-3 175B on 4,096 A100-80GB in one site, batch of 1,536, no offload (Isaev et al., SC'23): 1,081,872 configurations.
Calculon's optimum with overlap is TP 8, PP 4, DP 128, microbatch 3, 24 chunks, attention recompute, optimizer sharding,
3.829 s in its model; without overlap TP 8, PP 16, DP 32, microbatch 1, 6 chunks, 5.114 s.

python experiments/calculon_case.py
"""

from __future__ import annotations

import time

from common.spec import ClusterSpec, Site
from scale_across.estimate import TrainingJob
from scale_across.explore import explore
from scale_across.judge import Choice, judge
from scale_across.model_presets import load_model
from scale_across.parallelism import SELECTIVE, Parallelism
from scale_across.space import Space
from scale_across.space_kernel import compile_kernel
from scale_across.topology import Topology

THEIRS = (
    ("calculon_with_overlap", Parallelism(
        tp=8, pp=4, dp=128, microbatch=3, chunks=24, recompute=SELECTIVE, zero=1, sp=1, order=1), 3.829),
    ("calculon_without_overlap", Parallelism(
        tp=8, pp=16, dp=32, microbatch=1, chunks=6, recompute=SELECTIVE, zero=1, sp=1, order=1), 5.114),
)  # fmt: skip
MICROBATCHES = (1, 2, 3, 4, 6, 8)
MAX_CHUNKS = 24


def main() -> None:
    """Solve, then simulate Calculon's two optima."""
    site = Site(name="a", gpus=4096, accelerator="a100-80g", gpus_per_node=8)
    topology = Topology.from_cluster(ClusterSpec(name="calculon", sites=(site,)))
    job = TrainingJob(model="gpt-3-175b", global_batch=1536, seq_len=2048)
    model = load_model(job.model)
    space = Space.of(model, topology, job, MICROBATCHES, MAX_CHUNKS)
    region = next(space.regions())
    compile_kernel(region.setup)
    explore(model, topology, job, tolerance=0.5, rules=())  # compiles the simulation, too
    started = time.process_time()
    found = explore(model, topology, job, microbatches=MICROBATCHES, max_chunks=MAX_CHUNKS, rules=())
    print(f"calculon_space_cpu: {time.process_time() - started:.2f} s")
    print(f"calculon_space_gap: {100 * found.gap:.2f} %")
    print(f"calculon_space_rows: {found.bounded} rows")
    print(f"calculon_space_simulated: {len(found.simulated)} plans")
    print(f"ours: {found.best.step_s:.3f} s  ({found.best.describe()})")
    for name, plan, published_s in THEIRS:
        one = judge(Choice(region, plan, "1f1b", ("e-ecmp",), (region.count(plan),)))
        here = "does not fit the memory here" if one is None else f"{one.step_s:.3f} s"
        print(f"{name}: {here}  (in Calculon's model {published_s} s)")


if __name__ == "__main__":
    main()
