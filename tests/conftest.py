"""Shared by all tests: offline, quiet, one thread, and one simulated cluster for the tests that need Ray."""

from __future__ import annotations

import os

os.environ.update(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # common.cluster.LOOPBACK_ENV, before anything imports ray
    }
)
os.environ.pop("RAY_ADDRESS", None)

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.spec import ClusterSpec, Link, Site

THREE_SITES = ClusterSpec(
    name="three",
    sites=(
        Site(name="east-a", region="east", gpus=3, gpus_per_node=3, accelerator="cpu-core"),
        Site(name="east-b", region="east", gpus=2, gpus_per_node=2, accelerator="cpu-core"),
        Site(name="west", region="west", gpus=2, gpus_per_node=2, accelerator="cpu-core"),
    ),
    links=(
        Link(between=("east-a", "east-b"), bandwidth_gbps=1.0, latency_us=500),
        Link(between=("east-a", "west"), bandwidth_gbps=0.1, latency_us=30_000),
        Link(between=("east-b", "west"), bandwidth_gbps=0.2, latency_us=40_000),
    ),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files whose tests share something costly go to one process: the live cluster, the compiled kernels."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedSetUp(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.split("::", 1)[0])
            if file.name in ("test_cluster.py", "test_main_job.py"):
                return "cluster"
            return "kernels" if file.parent.name == "scale_across" else file.name

    return BySharedSetUp(config, log)


@pytest.fixture(scope="session")
def three_sites() -> ClusterSpec:
    """Two near sites and a far one."""
    return THREE_SITES


@pytest.fixture(scope="session")
def live_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterSpec, Path]]:
    """A running simulated cluster of `three_sites`, this process connected to it."""
    import ray

    from common import cluster

    state = tmp_path_factory.mktemp("cluster")
    info = cluster.up(THREE_SITES, state)
    try:
        ray.init(address=info.address, log_to_driver=False, logging_level="ERROR")
        yield THREE_SITES, state
    finally:
        ray.shutdown()
        cluster.down(state)
