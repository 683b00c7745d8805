"""Collectives between ranks at several sites: gloo carries the bytes, the link emulator says when they arrive.

Each collective sends the messages that `common.messages` lists, one gloo point-to-point message each. A message's first
eight bytes are the arrival time that its sender booked; the receiver waits until then. The result has the same bits on
every rank, since each element is summed on one rank, in a fixed order, and then copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from common.links import LinkEmulator, wait_until
from common.messages import Broadcast, Reduction, by_site, chunk_bounds

HEADER_BYTES = 8


class SiteGroup:
    """A process group whose ranks sit at sites.

    Args:
        name: tells the groups apart that meet at one store.
        rank: this process's place in `sites`.
        sites: the site of each rank.
        links: shared by all processes; its mode decides whether messages wait.
        store: rendezvous, for example `torch.distributed.TCPStore`.
        timeout_s: a collective whose peer is gone raises after this long.
    """

    def __init__(
        self, name: str, rank: int, sites: Sequence[str], links: LinkEmulator, store: Any, timeout_s: float = 60.0
    ) -> None:
        self.rank, self.sites, self.links = rank, tuple(sites), links
        self._groups = by_site(self.sites)
        self._gloo: Any = None
        if len(self.sites) > 1:
            prefixed = PrefixStore(name, store)
            self._gloo = dist.ProcessGroupGloo(prefixed, rank, len(self.sites), timedelta(seconds=timeout_s))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.sites)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce_mean(self, flat: torch.Tensor, kind: Reduction = "ring") -> None:
        """Replace `flat` (1-d, contiguous, float32) on every rank by the mean over the ranks.

        Message sequence: `common.messages.all_reduce_messages`.
        """
        if self.size == 1:
            return
        if kind == "ring":
            self._ring(flat, range(self.size))
        else:
            self._hierarchical(flat)
        flat.div_(self.size)

    def broadcast(self, flat: torch.Tensor, kind: Broadcast = "star") -> None:
        """Copy rank 0's `flat` (1-d, contiguous) to every rank. Sequence: `common.messages.broadcast_messages`."""
        home, *others = self._groups
        if kind == "star":
            peers = list(range(1, self.size)) if self.rank == 0 else []
            source = 0
        else:
            group = self._my_group()
            source = 0 if self.rank == group[0] or 0 in group else group[0]
            if self.rank == 0:
                peers = [g[0] for g in others] + home[1:]
            else:
                peers = group[1:] if self.rank == group[0] else []
        if self.rank != 0:
            flat.copy_(self._receive(flat, source))
        self._send_all(flat, peers)

    def _ring(self, flat: torch.Tensor, ranks: Sequence[int]) -> None:
        n = len(ranks)
        if n == 1:
            return
        here = list(ranks).index(self.rank)
        right, left = ranks[(here + 1) % n], ranks[(here - 1) % n]
        chunks = [flat[start:stop] for start, stop in chunk_bounds(flat.numel(), n)]
        for t in range(2 * (n - 1)):
            outgoing, incoming = chunks[(here - t) % n], chunks[(here - 1 - t) % n]
            sent = self._send(outgoing, right)
            received = self._receive(incoming, left)
            if t < n - 1:
                incoming.add_(received)
            else:
                incoming.copy_(received)
            _finish(sent)

    def _hierarchical(self, flat: torch.Tensor) -> None:
        group = self._my_group()
        leader, members = group[0], group[1:]
        if self.rank != leader:
            _finish(self._send(flat, leader))
            flat.copy_(self._receive(flat, leader))
            return
        for member in members:
            flat.add_(self._receive(flat, member))
        self._ring(flat, [g[0] for g in self._groups])
        self._send_all(flat, members)

    # -- messages --------------------------------------------------------------------------------------------------

    def _my_group(self) -> list[int]:
        return next(group for group in self._groups if self.rank in group)

    def _send_all(self, flat: torch.Tensor, peers: Sequence[int]) -> None:
        for sent in [self._send(flat, peer) for peer in peers]:
            _finish(sent)

    def _send(self, flat: torch.Tensor, peer: int) -> Any:
        payload = flat.detach().view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        arrival_s = self.links.reserve(self.sites[self.rank], self.sites[peer], payload.numel())
        header = torch.tensor([arrival_s], dtype=torch.float64).view(torch.uint8)
        message = torch.cat([header, payload])
        return message, self._gloo.send([message], peer, 0)  # the tensor must live until the send is done

    def _receive(self, like: torch.Tensor, peer: int) -> torch.Tensor:
        message = torch.empty(HEADER_BYTES + like.numel() * like.element_size(), dtype=torch.uint8)
        self._gloo.recv([message], peer, 0).wait()
        wait_until(float(message[:HEADER_BYTES].view(torch.float64)))
        return message[HEADER_BYTES:].view(like.dtype)


def _finish(sent: Any) -> None:
    sent[1].wait()
