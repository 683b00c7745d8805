"""The Ray layer on a real local cluster of three simulated sites."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import cluster
from common.config import ConfigError
from common.links import LinkEmulator
from common.messages import Routes, all_reduce_messages, broadcast_messages, finish_time_s
from common.spec import ClusterSpec, Placement

pytestmark = pytest.mark.cluster
Live = tuple[ClusterSpec, Path]
SITES = ("east-a", "east-a", "east-b", "west")


def test_discover_reads_sites_gpus_and_links_off_the_live_cluster(live_cluster: Live) -> None:
    spec, _ = live_cluster
    found = cluster.discover()
    assert {site.name: site.gpus for site in found.sites} == {"east-a": 3, "east-b": 2, "west": 2}
    assert {site.region for site in found.sites} == {"east", "west"}
    assert found.links == spec.links


def test_all_listeners_are_on_loopback(live_cluster: Live) -> None:
    info = cluster.running(live_cluster[1])
    assert info is not None
    holder = psutil.Process(info.holder_pid)
    addresses = {
        connection.laddr.ip
        for process in [holder, *holder.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert [ip for ip in addresses if not (ip.removeprefix("::ffff:").startswith("127.") or ip == "::1")] == []


def test_jobs_find_their_own_cluster_by_its_folder(live_cluster: Live) -> None:
    """The job supervisor looks up `ray_current_cluster` in its node's folder; without one it takes any cluster."""
    info = cluster.running(live_cluster[1])
    assert info is not None
    assert (Path(info.temp_dir) / "ray" / "ray_current_cluster").read_text() == info.address
    assert list((Path(info.temp_dir) / "ray").glob("session_*"))


def test_a_second_start_from_the_same_folder_is_refused(live_cluster: Live) -> None:
    with pytest.raises(ConfigError, match="already runs from here"):
        cluster.up(*live_cluster)


def test_a_port_in_use_is_named(three_sites: ClusterSpec, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            cluster.up(three_sites, tmp_path, dashboard_port=port)


def test_impossible_placements_are_refused_with_the_shortage_named(live_cluster: Live) -> None:
    from common.placement import PlacementError, reserve

    with pytest.raises(PlacementError) as error:
        reserve(Placement(roles={"learner": ("west",) * 5, "rollout": ("mars",)}))
    assert "site 'west' has 2 GPUs, the placement needs 5" in str(error.value)
    assert "site 'mars' is not in the running cluster" in str(error.value)


def test_gpus_taken_by_another_job_are_waited_for_and_then_named(live_cluster: Live) -> None:
    from common.placement import PlacementError, gpus_by_site, reserve

    with (
        reserve(Placement(roles={"learner": ("west", "west")})),
        pytest.raises(PlacementError, match=r"site 'west': needs 1, free 0 of 2"),
    ):
        reserve(Placement(roles={"learner": ("west",)}), timeout_s=0.5)
    with reserve(Placement(roles={"learner": ("west", "west")}), timeout_s=10):  # released, so it fits again
        assert gpus_by_site("sim_gpu")[0]["west"] == 2


class _Worker:
    """Joins a group over all ranks and takes part in collectives."""

    def __init__(self, rank: int, cluster_spec: ClusterSpec, link_file: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self.rank = rank
        self.links = LinkEmulator(cluster_spec, link_file)

    def site(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_labels()["site"]

    def open_store(self) -> int:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def join(self, port: int) -> None:
        from torch.distributed import TCPStore

        from common.collectives import SiteGroup

        self.group = SiteGroup("g", self.rank, SITES, self.links, TCPStore("127.0.0.1", port, is_master=False))

    def run(self, operation: str, kind: str, length: int) -> tuple[float, float, bytes]:
        """(start, end, result); the clock is the host's, so the ranks' times can be compared."""
        import torch

        flat = torch.arange(length, dtype=torch.float32) * (self.rank + 1)
        start_s = time.monotonic()
        if operation == "all_reduce":
            self.group.all_reduce_mean(flat, kind)  # type: ignore[arg-type]
        else:
            self.group.broadcast(flat, kind)  # type: ignore[arg-type]
        return start_s, time.monotonic(), flat.numpy().tobytes()

    def die(self) -> None:
        os._exit(3)


@pytest.fixture(scope="module")
def group(live_cluster: Live, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from common.placement import reserve
    from common.workers import WorkerGroup, collect

    spec, _ = live_cluster
    link_file = tmp_path_factory.mktemp("links") / "links"
    with reserve(Placement(roles={"learner": SITES})) as held:
        workers = WorkerGroup(
            _Worker, held, "learner", lambda rank: {"rank": rank, "cluster_spec": spec, "link_file": link_file}
        )
        port = collect({workers: [workers.actors[0].open_store.remote()]})[workers][0]
        workers.call("join", port, timeout_s=60)
        yield workers
        workers.stop()


def test_ranks_sit_where_the_placement_says(group: Any) -> None:
    assert tuple(group.call("site")) == SITES


@pytest.mark.parametrize("kind", ["ring", "hierarchical"])
def test_all_reduce_gives_the_mean_with_the_same_bits_everywhere(group: Any, kind: str) -> None:
    import numpy as np

    results = [data for _, _, data in group.call("run", "all_reduce", kind, 1003)]
    assert len(set(results)) == 1
    assert np.allclose(np.frombuffer(results[0], np.float32), np.arange(1003) * 2.5)


@pytest.mark.parametrize("kind", ["star", "relay"])
def test_broadcast_copies_rank_0(group: Any, kind: str) -> None:
    import numpy as np

    results = [data for _, _, data in group.call("run", "broadcast", kind, 1003)]
    assert set(results) == {np.arange(1003, dtype=np.float32).tobytes()}


def test_emulated_collectives_never_beat_the_prediction_and_come_near_it(group: Any, three_sites: ClusterSpec) -> None:
    """A message cannot arrive before its link allows; how much later it comes depends on the machine's load."""
    routes, length = Routes(three_sites), 300_000
    for operation, kind, messages in (
        ("all_reduce", "ring", all_reduce_messages("ring", SITES, length)),
        ("all_reduce", "hierarchical", all_reduce_messages("hierarchical", SITES, length)),
        ("broadcast", "relay", broadcast_messages("relay", SITES, length)),
    ):
        predicted_s = finish_time_s(routes, SITES, messages)
        runs = group.call("run", operation, kind, length)
        assert max(end for _, end, _ in runs) - min(start for start, _, _ in runs) >= predicted_s


def test_a_dead_worker_is_an_error_that_names_it(group: Any) -> None:
    from common.workers import WorkerDied, collect

    alive = [actor.run.remote("all_reduce", "ring", 10) for actor in group.actors[:3]]
    with pytest.raises(WorkerDied, match="learner rank 3 at site 'west' died"):
        collect({group: [*alive, group.actors[3].die.remote()]}, timeout_s=60)


def test_no_process_outlives_a_holder_that_is_killed(three_sites: ClusterSpec, tmp_path: Path) -> None:
    """The hard way to end; the orderly one is checked by what the main job's tests leave behind."""
    one = ClusterSpec(sites=three_sites.sites[:1])
    command = (
        "import sys; from pathlib import Path; from common import cluster; from common.spec import ClusterSpec;"
        "print(cluster.up(ClusterSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2])).holder_pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, one.model_dump_json(), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    holder = psutil.Process(int(done.stdout.strip().splitlines()[-1]))
    family = [holder, *holder.children(recursive=True)]
    assert len(family) > 5
    holder.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [process.name() for process in alive] == []
    assert cluster.running(tmp_path) is None  # and the stale state file does not block the next start
    assert not cluster.down(tmp_path)
