"""The joint search at scale: seconds, gap and memory. Prints `name: value unit` lines; the bounds are compiled before.

python experiments/bench/bench_explore.py
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from common.spec import ClusterSpec, Site
from scale_across.estimate import TrainingJob
from scale_across.explore import explore
from scale_across.model_presets import load_model
from scale_across.site_network import load_cluster
from scale_across.space import Space
from scale_across.space_kernel import compile_kernel
from scale_across.topology import Topology

FIVE = load_cluster(Path(__file__).parents[1] / "configs" / "five_sites.yaml")


def scaled(gpus: int) -> ClusterSpec:
    """The five sites with `gpus` in all, in the same proportions; the links keep their share per GPU."""
    factor = gpus / FIVE.gpus
    sites = tuple(Site.model_validate({**site.model_dump(), "gpus": int(site.gpus * factor)}) for site in FIVE.sites)
    links = tuple(link.model_copy(update={"bandwidth_gbps": link.bandwidth_gbps * factor}) for link in FIVE.links)
    return ClusterSpec(name=f"five-{gpus}", sites=sites, links=links)


def two_sites() -> ClusterSpec:
    """1,024 GPUs."""
    one, other = (Site(name=name, gpus=512, accelerator="h100-sxm") for name in ("a", "b"))
    return ClusterSpec.model_validate(
        {
            "sites": [one.model_dump(), other.model_dump()],
            "links": [{"between": ["a", "b"], "bandwidth_gbps": 3200, "latency_us": 1000}],
        }
    )


def measure(name: str, spec: ClusterSpec, model: str, batch: int, tolerance: float = 0.0) -> None:
    """The best plan alone, then with all baselines tuned over what they leave open."""
    shape, topology = load_model(model), Topology.from_cluster(spec)
    job = TrainingJob(model=model, global_batch=batch, seq_len=8192)
    cpu = time.process_time()
    found = explore(shape, topology, job, tolerance=tolerance, rules=())
    print(f"explore_{name}_cpu: {time.process_time() - cpu:.2f} s")
    print(f"explore_{name}_wall: {found.runtime_s:.2f} s")
    print(f"explore_{name}_gap: {100 * found.gap:.2f} %")
    print(f"explore_{name}_rows: {found.bounded} rows")
    print(f"explore_{name}_simulated: {len(found.simulated)} plans")
    print(f"explore_{name}_step: {found.best.step_s:.3f} s", flush=True)
    if tolerance == 0:
        whole = explore(shape, topology, job)
        print(f"explore_{name}_with_baselines_wall: {whole.runtime_s:.2f} s")
        for plan in whole.baselines:
            print(f"explore_{name}_over_{plan.name}: {100 * whole.speedup_over(plan):.2f} %", flush=True)


def main() -> None:
    """Compile, then growth with the cluster, then the two large models."""
    job = TrainingJob(model="llama-3.2-1b", global_batch=8, seq_len=2048)
    warm = Space.of(load_model(job.model), Topology.from_cluster(ClusterSpec(sites=(Site(name="a", gpus=8),))), job)
    compile_kernel(next(warm.regions()).setup)
    explore(warm.model, warm.topology, job, tolerance=0.1)
    measure("1k_2sites_llama70b", two_sites(), "llama-3.1-70b", 512)
    measure("1k_2sites_llama70b_within_3_percent", two_sites(), "llama-3.1-70b", 512, tolerance=0.03)
    for gpus in (8192, 32768, 131072):
        measure(f"{gpus}_5sites_llama405b", scaled(gpus), "llama-3.1-405b", gpus // 8)
    measure("131072_5sites_maverick", FIVE, "llama-4-maverick", 16384)
    print(f"explore_peak_memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
