"""One rank of a pipeline: blocks in the order of a schedule, messages over gloo. Started by `schedule_testbed.py`.

Receives are posted before a step starts: gloo sends a message's data only once its receiver has posted, so that sends
are asynchronous as the simulation has them. On links that the kernel shapes a message takes what it takes; else its
first eight bytes are the arrival time that `common.links` booked, and the receiver waits until then.

A block can be paced: the rank computes it for real, then waits until a given time has passed since its start, as if the
rank were an accelerator of its own. Four ranks on two cores would otherwise slow each other down.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch._C._distributed_c10d import FileStore

from common.config import Config
from common.links import LinkEmulator, wait_until
from common.messages import chunk_bounds
from common.spec import ClusterSpec
from pipeline_training import Chunk, Passed, Shape, batch

F, D, W, B = 0, 1, 2, 3
TIMEOUT_S = 60.0
HEADER_BYTES = 8
SYNC_TAG, PROBE_TAG, REDUCE_TAG, BOUNDARY_TAG = 1, 1000, 10_000, 1_000_000


class RankSpec(Config):
    """What every rank is told at its start."""

    cluster: ClusterSpec
    sites: tuple[str, ...]
    """Of each rank."""
    folder: str
    """For the rendezvous and the emulated links; shared by all ranks."""
    mode: Literal["calibrated-wait", "off"]
    """"off": the links are real."""
    shape: Shape
    learning_rate: float = 0.05
    settle_s: float = Field(default=0.01, ge=0)
    """From the last rank's readiness to the common start of a step, beyond the latency of links."""


class Job(Config):
    """Which rank does what in one run: replicas of a pipeline, stages, orders."""

    ranks_RS: tuple[tuple[int, ...], ...]
    """Rank of every stage of every replica."""
    device_of_virtual_V: tuple[int, ...]
    orders: tuple[tuple[tuple[int, int, int, int], ...], ...]
    """Per stage: (kind, microbatch, chunk, slice)."""
    microbatches: int = Field(gt=0)
    """Of one replica."""
    steps: int = Field(gt=0)
    pace_s: tuple[float, float, float] | None = None
    """F, D, W of one layer; None: as fast as it goes."""

    @model_validator(mode="after")
    def _whole_microbatches(self) -> Job:
        if any(cut for order in self.orders for *_, cut in order):
            raise ValueError("orders: sequence slices are not run here; give whole microbatches")
        return self


class Post:
    """Messages between ranks, receives posted ahead."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        self.rank, self.sites = rank, spec.sites
        folder = Path(spec.folder)
        self.links = LinkEmulator(spec.cluster, folder / "links", spec.mode)
        self.header = HEADER_BYTES if spec.mode == "calibrated-wait" else 0
        store = FileStore(str(folder / "store"), len(spec.sites))
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, len(spec.sites), timedelta(seconds=TIMEOUT_S))
        self._expected: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._sent: list[tuple[torch.Tensor, Any]] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start a message; `tensor` must not change until `finish`."""
        if self.header:
            arrival_s = self.links.reserve(self.sites[self.rank], self.sites[peer], tensor.nbytes)
            header = torch.tensor([arrival_s], dtype=torch.float64).view(torch.uint8)
            tensor = torch.cat([header, tensor.detach().contiguous().flatten().view(torch.uint8)])
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, self._gloo.send([tensor], peer, tag)))

    def expect(self, numel: int, peer: int, tag: int) -> None:
        """Post the receive of `numel` float32."""
        buffer = torch.empty(self.header + 4 * numel, dtype=torch.uint8) if self.header else torch.empty(numel)
        self._expected[peer, tag] = (buffer, self._gloo.recv([buffer], peer, tag))

    def take(self, peer: int, tag: int) -> torch.Tensor:
        """Wait for an expected message; flat float32."""
        buffer, work = self._expected.pop((peer, tag))
        work.wait()
        if self.header:
            wait_until(float(buffer[:HEADER_BYTES].view(torch.float64)))
            return buffer[HEADER_BYTES:].view(torch.float32)
        return buffer

    def finish(self) -> None:
        """Wait until all sends are out of their buffers."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def agree_on_start(self, ranks: Sequence[int], settle_s: float) -> float:
        """A time that lies ahead for all of `ranks`, on the clock that they share; all must call this."""
        first = ranks[0]
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        answer = torch.empty(1, dtype=torch.float64)
        if self.rank != first:
            self._gloo.send([now], first, SYNC_TAG).wait()
            self._gloo.recv([answer], first, SYNC_TAG + 1).wait()
            return float(answer)
        for peer in ranks[1:]:
            self._gloo.recv([answer], peer, SYNC_TAG).wait()
        latency_s = sum(link.latency_us for link in self.links.cluster.links) * 1e-6
        answer[0] = time.monotonic() + settle_s + 3 * latency_s
        for peer in ranks[1:]:
            self._gloo.send([answer], peer, SYNC_TAG + 1).wait()
        return float(answer)


def ring_expect(post: Post, ranks: Sequence[int], lengths: Sequence[int]) -> None:
    """Post all receives of `ring_sum`."""
    n = len(ranks)
    here = list(ranks).index(post.rank)
    for t in range(2 * (n - 1)):
        for k, length in enumerate(lengths):
            start, stop = chunk_bounds(length, n)[(here - 1 - t) % n]
            post.expect(stop - start, ranks[(here - 1) % n], REDUCE_TAG + 100 * t + k)


def ring_sum(post: Post, ranks: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
    """Sum each of `flats` (1-d) over the ranks, in place: the messages of `common.messages.ring_messages`."""
    n = len(ranks)
    here = list(ranks).index(post.rank)
    for t in range(2 * (n - 1)):
        for k, flat in enumerate(flats):
            start, stop = chunk_bounds(flat.numel(), n)[(here - t) % n]
            # a copy: later rounds write here while the message may still be in its buffer
            post.send(flat[start:stop].clone(), ranks[(here + 1) % n], REDUCE_TAG + 100 * t + k)
        for k, flat in enumerate(flats):
            start, stop = chunk_bounds(flat.numel(), n)[(here - 1 - t) % n]
            got = post.take(ranks[(here - 1) % n], REDUCE_TAG + 100 * t + k)
            if t < n - 1:
                flat[start:stop].add_(got)
            else:
                flat[start:stop].copy_(got)


@dataclass
class Stage:
    """This rank's part in a job."""

    post: Post
    spec: RankSpec
    job: Job
    overruns: int = 0
    """Blocks whose computing took longer than their pace."""
    spans: list[tuple[int, int, float]] = field(default_factory=list)
    """(kind, virtual stage, seconds) of every block run."""

    def __post_init__(self) -> None:
        job, rank = self.job, self.post.rank
        self.replica, self.stage = next((r, ranks.index(rank)) for r, ranks in enumerate(job.ranks_RS) if rank in ranks)
        self.mine = [v for v, device in enumerate(job.device_of_virtual_V) if device == self.stage]
        virtuals, share = len(job.device_of_virtual_V), 1 / (job.microbatches * len(job.ranks_RS))
        self.chunks = {v: Chunk(self.spec.shape, v, virtuals, share) for v in self.mine}
        self.passed: dict[tuple[int, int], Passed] = {}
        self.inside: dict[tuple[int, int, int], torch.Tensor] = {}
        self.loss = self.update_s = 0.0

    def neighbour(self, virtual: int) -> int | None:
        """The rank that holds a virtual stage; None if there is no such stage."""
        if not 0 <= virtual < len(self.job.device_of_virtual_V):
            return None
        return self.job.ranks_RS[self.replica][self.job.device_of_virtual_V[virtual]]

    def tag(self, direction: int, virtual: int, microbatch: int) -> int:
        """Of the message to `virtual`: direction F or D."""
        return BOUNDARY_TAG + (direction * 1000 + virtual) * 1000 + microbatch

    @property
    def peers(self) -> list[int]:
        """The same stage in all replicas."""
        return [ranks[self.stage] for ranks in self.job.ranks_RS]

    def step(self, step: int) -> tuple[float, float]:
        """Run one step; (start, end) on the shared clock."""
        offset = self.replica * self.job.microbatches
        data = [batch(self.spec.shape, step, offset + m) for m in range(self.job.microbatches)]
        numel = self.spec.shape.boundary_bytes // 4
        for kind, microbatch, chunk, _ in self.job.orders[self.stage]:
            virtual = self.mine[chunk]
            source = self.neighbour(virtual - 1 if kind == F else virtual + 1) if kind != W else None
            if source is not None and source != self.post.rank:
                self.post.expect(numel, source, self.tag(F if kind == F else D, virtual, microbatch))
        ring_expect(self.post, self.peers, [chunk.flat_gradient.numel() for chunk in self.chunks.values()])
        self.loss = 0.0
        everyone = [rank for ranks in self.job.ranks_RS for rank in ranks]
        start_s = self.post.agree_on_start(everyone, self.spec.settle_s)
        wait_until(start_s)
        for kind, microbatch, chunk, _ in self.job.orders[self.stage]:
            self.block(kind, self.mine[chunk], microbatch, data[microbatch])
        ring_sum(self.post, self.peers, [chunk.flat_gradient for chunk in self.chunks.values()])
        reduced_s = time.monotonic()
        for held in self.chunks.values():
            held.update(self.spec.learning_rate)
        end_s = time.monotonic()
        self.update_s = end_s - reduced_s
        self.post.finish()
        return start_s, end_s

    def block(self, kind: int, virtual: int, microbatch: int, tokens_BU: torch.Tensor) -> None:
        """Wait for what it needs, compute, and send what it makes."""
        given = self.receive(kind, virtual, microbatch)
        begin_s = time.monotonic()
        made = self.compute(kind, virtual, microbatch, given, tokens_BU)
        if self.job.pace_s is not None:
            pace_s = (*self.job.pace_s, self.job.pace_s[D] + self.job.pace_s[W])[kind]
            due_s = begin_s + pace_s * len(self.chunks[virtual].layers)
            self.overruns += time.monotonic() > due_s
            wait_until(due_s)
        self.spans.append((kind, virtual, time.monotonic() - begin_s))
        target = self.neighbour(virtual + 1 if kind == F else virtual - 1) if kind != W else None
        if target is None or made is None:
            return
        direction, there = (F, virtual + 1) if kind == F else (D, virtual - 1)
        if target == self.post.rank:
            self.inside[direction, there, microbatch] = made
        else:
            self.post.send(made, target, self.tag(direction, there, microbatch))

    def receive(self, kind: int, virtual: int, microbatch: int) -> torch.Tensor | None:
        """Input [B, T, C] of F, or gradient [B, T, C] for D and B; None at the ends of the pipeline and for W."""
        source = self.neighbour(virtual - 1 if kind == F else virtual + 1) if kind != W else None
        if source is None:
            return None
        direction = F if kind == F else D
        if source == self.post.rank:
            return self.inside.pop((direction, virtual, microbatch))
        shape = self.spec.shape
        flat = self.post.take(source, self.tag(direction, virtual, microbatch))
        return flat.view(shape.sequences, shape.tokens, shape.width)

    def compute(
        self, kind: int, virtual: int, microbatch: int, given: torch.Tensor | None, tokens_BU: torch.Tensor
    ) -> torch.Tensor | None:
        """The block itself; what must go on to the next stage, if anything."""
        chunk = self.chunks[virtual]
        if kind == F:
            passed = self.passed[virtual, microbatch] = chunk.forward(given, tokens_BU)
            if chunk.last:
                self.loss += float(passed.out.detach())
            return passed.out.detach()
        passed = self.passed[virtual, microbatch]
        made = chunk.input_gradient(passed, given) if kind in (D, B) else None
        if kind in (W, B):
            chunk.weight_gradient(passed)
            del self.passed[virtual, microbatch]
        return made


# -- what a rank can be asked -----------------------------------------------------------------------------------------


def run_job(post: Post, spec: RankSpec, job: Job, warmup: int) -> dict[str, Any]:
    """Steps of training. Times, losses; without the warm-up, median seconds per block kind and virtual stage."""
    stage = Stage(post, spec, job)
    times, losses = [], []
    for step in range(job.steps):
        if step == warmup:
            stage.spans.clear()
            stage.overruns = 0
        times.append(stage.step(step))
        losses.append(stage.loss)
    found: dict[tuple[int, int], list[float]] = {}
    for kind, virtual, span_s in stage.spans:
        found.setdefault((kind, virtual), []).append(span_s)
    return {
        "times": times,
        "losses": losses,
        "durations": [[kind, virtual, statistics.median(spans)] for (kind, virtual), spans in found.items()],
        "update_s": stage.update_s,
        "overruns": stage.overruns,
        "blocks": len(stage.spans),
    }


def probe(post: Post, spec: RankSpec, ranks: tuple[int, int], nbytes: int, count: int) -> dict[str, float]:
    """The way from the first rank to the second: medians of small round trips and of `count` messages back to back.

    Meaningful are `round_trip_s` of the first rank, and `arrived_s` of the second: seconds from the start of the first
    message of `nbytes` to the arrival of the last.
    """
    source, target = ranks
    sends, there = post.rank == source, target if post.rank == source else source
    trips, spans = [], []
    for trip in range(12):
        tag = PROBE_TAG + trip
        post.expect(1, there, tag)
        start_s = post.agree_on_start(ranks, spec.settle_s)
        wait_until(start_s)
        if sends:
            post.send(torch.zeros(1), there, tag)
        post.take(there, tag)
        trips.append(time.monotonic() - start_s)
        if not sends:
            post.send(torch.zeros(1), there, tag)
        post.finish()
    for attempt in range(3):
        tags = [PROBE_TAG + 100 * (attempt + 1) + k for k in range(count)]
        for tag in tags if not sends else ():
            post.expect(nbytes // 4, there, tag)
        start_s = post.agree_on_start(ranks, spec.settle_s)
        wait_until(start_s)
        for tag in tags:
            if sends:
                post.send(torch.zeros(nbytes // 4), there, tag)
            else:
                post.take(there, tag)
        spans.append(time.monotonic() - start_s)
        post.finish()
    return {"round_trip_s": statistics.median(trips), "arrived_s": statistics.median(spans)}


def answer(post: Post, spec: RankSpec, question: dict[str, Any]) -> dict[str, Any]:
    """One request of the driver."""
    match question.pop("do"):
        case "run":
            warmup = question.pop("warmup")
            return run_job(post, spec, Job.model_validate(question), warmup)
        case "probe":
            return probe(post, spec, tuple(question["between"]), question["nbytes"], question["count"])
        case unknown:
            raise ValueError(f"no such request: {unknown}")


def main() -> NoReturn:
    """`pipeline_training_rank.py SPEC.json RANK`: requests as JSON lines, an answer line for each."""
    spec = RankSpec.model_validate_json(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    post = Post(spec, int(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(post, spec, json.loads(line))), flush=True)
    os._exit(0)  # taking gloo and torch down in good order takes a second, and nothing is left to save


if __name__ == "__main__":
    main()
