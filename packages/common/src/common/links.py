"""Cross-site traffic made real on one machine without root: every message waits as long as its links would take.

All processes of the host share one small file: for each link and direction the time until which it is taken (by the
system-wide monotonic clock), and the bytes and messages that it carried. A sender books its message there, behind those
already queued, by the model of `common.messages`; whoever receives it waits until the booked arrival.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np

from common.messages import Routes, book
from common.spec import ClusterSpec

Mode = Literal["calibrated-wait", "off"]
SPIN_S = 0.0005
"""The last stretch of a wait is spun, since a sleeping process wakes up to that much late."""


class LinkEmulator:
    """The links of one emulated cluster, shared by all processes that open the same `path`.

    Args:
        cluster: sites and links; each process passes the same one.
        path: the shared file, made when missing.
        mode: "off" books nothing and never waits (a real cluster, or a profile without network).
    """

    def __init__(self, cluster: ClusterSpec, path: str | os.PathLike[str], mode: Mode = "calibrated-wait") -> None:
        self.cluster = cluster
        self.path = Path(path)
        self.mode = mode
        self.routes = Routes(cluster)
        slots = max(1, 2 * len(cluster.links))
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, 3 * 8 * slots)
        self._memory = mmap.mmap(self._file, 3 * 8 * slots)
        table = np.frombuffer(self._memory, dtype=np.float64).reshape(3, slots)
        self._busy_until_s, self._bytes, self._messages = table

    def reserve(self, src: str, dst: str, nbytes: int) -> float:
        """Book a message that leaves now and return its arrival on the monotonic clock: now, if nothing is emulated."""
        now_s = time.monotonic()
        if self.mode == "off" or src == dst:
            return now_s
        route = self.routes(src, dst)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            arrival_s = book(route, self._busy_until_s, now_s, nbytes)  # type: ignore[arg-type]
            for link, direction in route.hops:
                self._bytes[2 * link + direction] += nbytes
                self._messages[2 * link + direction] += 1
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return float(arrival_s)

    def transfer(self, src: str, dst: str, nbytes: int) -> None:
        """Book a message and wait until it has arrived."""
        wait_until(self.reserve(src, dst, nbytes))

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes and messages so far, per "from->to" of each link."""
        report = {}
        for index, link in enumerate(self.cluster.links):
            for direction, (a, b) in enumerate((link.between, link.between[::-1])):
                slot = 2 * index + direction
                report[f"{a}->{b}"] = {"bytes": int(self._bytes[slot]), "messages": int(self._messages[slot])}
        return report

    def close(self) -> None:
        """Let go of the shared file; the file itself stays for the other processes."""
        del self._busy_until_s, self._bytes, self._messages
        self._memory.close()
        os.close(self._file)


def wait_until(arrival_s: float) -> None:
    """Return when the monotonic clock has reached `arrival_s`."""
    remaining_s = arrival_s - time.monotonic()
    if remaining_s > SPIN_S:
        time.sleep(remaining_s - SPIN_S)
    while time.monotonic() < arrival_s:
        pass
