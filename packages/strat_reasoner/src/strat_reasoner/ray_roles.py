"""The roles as Ray actors at their sites, and what crosses between them.

Rollout workers and the comparison worker exchange Ray objects; whoever receives one from another site first waits for
the link. Learner ranks all-reduce, and rank 0 broadcasts weights, by torch.distributed (`common.collectives`).
The order of messages is what the Explorer prices in `scale_across.rl_job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch._C._distributed_c10d import TCPStore

from common.collectives import SiteGroup
from common.links import LinkEmulator, Mode, wait_until
from common.messages import Broadcast, Reduction
from common.placement import Reservation
from common.spec import ClusterSpec
from common.workers import WorkerGroup, collect
from strat_reasoner.comparer import Comparer
from strat_reasoner.config import TrainConfig
from strat_reasoner.evaluate import EstimatedTable, MatchResult, estimate_table, play_matches
from strat_reasoner.games import Player
from strat_reasoner.learner import Learner
from strat_reasoner.model_player import ModelPlayer
from strat_reasoner.objective import Shard
from strat_reasoner.policy import flatten, numpy_rng
from strat_reasoner.rollout import RolloutBatch, RolloutWorker

STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Network:
    """Where all roles sit and how they communicate: what each worker is told when it starts."""

    cluster: ClusterSpec
    link_file: Path
    learner: tuple[str, ...]
    rollout: tuple[str, ...]
    comparison: str
    reduction: Reduction
    weight_sync: Broadcast


class _Member:
    """What all workers share: their links, and the two process groups."""

    def __init__(self, network: Network, site: str) -> None:
        torch.set_num_threads(1)
        self.network, self.site = network, site
        self.links = LinkEmulator(network.cluster, network.link_file, "off")

    def set_links(self, mode: Mode) -> None:
        """Switch link emulation on or off for this worker's messages."""
        self.links.mode = mode

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes and messages per link so far, over all workers."""
        return self.links.traffic()

    def _join(self, host: str, port: int, name: str, rank: int, sites: Sequence[str]) -> SiteGroup:
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
        )
        return SiteGroup(name, rank, sites, self.links, store)

    def _await_arrivals(self, sources: Sequence[tuple[str, int]]) -> None:
        """Wait for messages that were all sent now, from (site, bytes) to here."""
        arrivals = [self.links.reserve(site, self.site, nbytes) for site, nbytes in sources]
        wait_until(max(arrivals))


class LearnerActor(_Member):
    """One learner rank."""

    def __init__(self, config: TrainConfig, network: Network, rank: int) -> None:
        super().__init__(network, network.learner[rank])
        self.rank = rank
        self.learner = Learner(config, rank, len(network.learner), self._reduce_mean)

    def open_store(self) -> tuple[str, int]:
        """Start the rendezvous store on a free port of this node; rank 0 only."""
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
        )
        return host, self.store.port

    def connect(self, address: tuple[str, int]) -> None:
        """Join the gradient group, and as rank 0 the weight group."""
        n = self.network
        self.gradients = self._join(*address, "gradients", self.rank, n.learner)
        if self.rank == 0:
            self.weights = self._join(*address, "weights", 0, (n.learner[0], *n.rollout))

    def _reduce_mean(self, flat: torch.Tensor) -> None:
        self.gradients.all_reduce_mean(flat, self.network.reduction)

    def warm_start(self, start: int, stop: int) -> list[float]:
        """Supervised steps start..stop; see `Learner.warm_start_steps`."""
        return self.learner.warm_start_steps(range(start, stop))

    def use_as_reference(self) -> None:
        """See `Learner.use_as_reference`."""
        self.learner.use_as_reference()

    def update(self, shard: Shard) -> dict[str, float]:
        """Wait for the shard's way from the comparison worker, then train on it."""
        self._await_arrivals([(self.network.comparison, shard.nbytes)])
        return self.learner.update(shard)

    def send_weights(self) -> None:
        """Broadcast the weights to the rollout workers; rank 0 only."""
        self.weights.broadcast(self.learner.flat_weights(), self.network.weight_sync)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `Learner.state`."""
        return self.learner.state()

    def load_state(self, state: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        """See `Learner.load_state`."""
        self.learner.load_state(*state)


class RolloutActor(_Member):
    """One rollout worker; it also evaluates, since it holds the policy."""

    def __init__(self, config: TrainConfig, network: Network, rank: int) -> None:
        super().__init__(network, network.rollout[rank])
        self.rank = rank
        self.worker = RolloutWorker(config, rank, len(network.rollout))

    def connect(self, address: tuple[str, int]) -> None:
        """Join the weight group."""
        n = self.network
        self.weights = self._join(*address, "weights", self.rank + 1, (n.learner[0], *n.rollout))

    def collect(self, step: int) -> RolloutBatch:
        """Play this worker's games."""
        return self.worker.collect(step)

    def receive_weights(self) -> None:
        """Take part in the weight broadcast."""
        flat = flatten(self.worker.model)
        self.weights.broadcast(flat, self.network.weight_sync)
        self.worker.load_weights(flat)

    def estimate(self, samples: int, seed: int) -> EstimatedTable:
        """Estimate the policy's table; the random stream is this rank's own."""
        return estimate_table(self._player(), self.worker.game, samples, numpy_rng(seed, "table", self.rank))

    def play_share(self, share: tuple[Player | None, int, int, int]) -> MatchResult:
        """Play (opponent, seat, games, seed); the opponent None is this policy itself."""
        opponent, seat, games, seed = share
        player = self._player()
        return play_matches(self.worker.game, player, opponent or player, seat, games, seed)

    def sample_transcripts(self, games: int, seed: int) -> list[str]:
        """What both players wrote in some self-play games, as readable lines."""
        return self.worker.transcripts(games, seed)

    def _player(self) -> ModelPlayer:
        w = self.worker
        return ModelPlayer(w.model, w.vocabulary, w.config.rollout)


class ComparisonActor(_Member):
    """The comparison worker."""

    def __init__(self, config: TrainConfig, network: Network, rank: int) -> None:
        super().__init__(network, network.comparison)
        self.comparer = Comparer(config, len(network.learner))

    def process(self, *batches: RolloutBatch) -> tuple[list[Any], dict[str, float]]:
        """Wait for the batches' way here, compare them; returns object references of the shards, and statistics."""
        self._await_arrivals([(s, b.nbytes) for s, b in zip(self.network.rollout, batches, strict=True)])
        shards, statistics = self.comparer.process(list(batches))
        statistics["trajectory_bytes"] = float(sum(batch.nbytes for batch in batches))
        statistics["shard_bytes"] = float(sum(shard.nbytes for shard in shards))
        return [ray.put(shard) for shard in shards], statistics

    def state(self) -> dict[str, float]:
        """What the advantage estimator remembers."""
        return self.comparer.memory.baselines

    def load_state(self, baselines: dict[str, float]) -> None:
        """Continue from what `state` returned."""
        self.comparer.memory.baselines = dict(baselines)


class RayRoles:
    """All roles of one placement; implements `strat_reasoner.train.Roles`."""

    def __init__(self, config: TrainConfig, network: Network, reservation: Reservation) -> None:
        self.network = network

        def arguments(rank: int) -> dict[str, Any]:
            return {"config": config, "network": network, "rank": rank}

        self.learner = WorkerGroup(LearnerActor, reservation, "learner", arguments)
        self.rollout = WorkerGroup(RolloutActor, reservation, "rollout", arguments)
        self.comparison = WorkerGroup(ComparisonActor, reservation, "comparison", arguments)
        self.groups = (self.learner, self.rollout, self.comparison)
        address = collect({self.learner: [self.learner.actors[0].open_store.remote()]})[self.learner][0]
        collect({group: group.start_call("connect", address) for group in (self.learner, self.rollout)})

    def set_links(self, mode: Mode) -> None:
        """Switch link emulation on or off everywhere."""
        collect({group: group.start_call("set_links", mode) for group in self.groups})

    # -- the phases of a step ------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Any]:
        """References of the rollout workers' batches, when all are there; the data go on without passing here."""
        refs = self.rollout.start_call("collect", step)
        collect({self.rollout: refs})
        return refs

    def compare(self, batches: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """References of the shards, and statistics."""
        call = [self.comparison.actors[0].process.remote(*batches)]
        shards, statistics = collect({self.comparison: call})[self.comparison][0]
        return shards, statistics

    def update(self, shards: list[Any]) -> dict[str, float]:
        """Train all ranks. Their statistics are sums over shards, so they add up; the gradient norm is common."""
        per_rank = self.learner.call_each("update", shards)
        total = {name: sum(rank[name] for rank in per_rank) for name in per_rank[0]}
        return total | {"grad_norm": per_rank[0]["grad_norm"]}

    def sync_weights(self) -> None:
        """Broadcast learner rank 0's weights to the rollout workers."""
        collect(
            {
                self.learner: [self.learner.actors[0].send_weights.remote()],
                self.rollout: self.rollout.start_call("receive_weights"),
            }
        )

    # -- before, between and after steps -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and JSON values of a checkpoint."""
        call = [self.learner.actors[0].state.remote()]
        tensors, meta = collect({self.learner: call})[self.learner][0]
        return tensors, meta | {"baselines": self.comparison.call("state")[0]}

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Continue all roles from a checkpoint."""
        self.learner.call("load_state", ray.put((tensors, meta)))
        self.comparison.call("load_state", meta["baselines"])
        self.sync_weights()

    def estimate_table(self, samples: int, seed: int) -> EstimatedTable:
        """Policy table of the current weights, its samples shared out over the rollout workers."""
        share = -(-samples // len(self.rollout))
        parts = self.rollout.call("estimate", share, seed)
        return EstimatedTable({key: np.concatenate([part.samples[key] for part in parts]) for key in parts[0].samples})

    def stop(self) -> None:
        """End all workers."""
        for group in self.groups:
            group.stop()
