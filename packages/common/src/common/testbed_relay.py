"""Delay on a link whose kernel has no netem: packets pass from one TUN device to another, each `delay_s` late.

A process of its own, started by `common.testbed` as root. It reads one JSON line from its input, a list of
{"ends": [namespace, namespace], "device": name, "delay_s": seconds}, makes both devices of every link, answers "ready",
and carries packets until its input closes (also when the parent dies). Then it prints what it did as one JSON line.

The rate is not its business: `tc tbf` on the devices lets packets out to it at the rate of the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 65_536
BATCH = 64
"""Packets read from one device before the others have their turn."""


@dataclass
class Pipe:
    """One direction of a link: packets in the order of their arrival, with the time at which each is due."""

    source: int
    target: int
    delay_s: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    packets: int = 0
    bytes: int = 0
    late_s: float = 0.0
    most_late_s: float = 0.0
    lost: int = 0

    def take(self) -> None:
        """Read what the device has; a packet is due `delay_s` after it was read."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            self.waiting.append((time.monotonic() + self.delay_s, packet))

    def give(self, now_s: float) -> None:
        """Hand on every packet that is due."""
        while self.waiting and self.waiting[0][0] <= now_s:
            due_s, packet = self.waiting.popleft()
            try:
                os.write(self.target, packet)
            except OSError:  # the receiving queue is full or the device is down: a real network loses it too
                self.lost += 1
            late_s = now_s - due_s
            self.packets, self.bytes = self.packets + 1, self.bytes + len(packet)
            self.late_s, self.most_late_s = self.late_s + late_s, max(self.most_late_s, late_s)


def relay(pipes: Sequence[Pipe], stop: int) -> None:
    """Carry packets until the file descriptor `stop` can be read (it closed)."""
    sources = {pipe.source: pipe for pipe in pipes}
    while True:
        due = [pipe.waiting[0][0] for pipe in pipes if pipe.waiting]
        # select and not epoll: its timeout counts microseconds, that of epoll whole milliseconds
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([*sources, stop], [], [], timeout_s)
        if stop in ready:
            return
        for source in ready:
            sources[source].take()
        now_s = time.monotonic()
        for pipe in pipes:
            pipe.give(now_s)


def open_device(namespace: str, device: str) -> int:
    """A new TUN device in a network namespace; it lives as long as the file descriptor."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    finally:
        libc.setns(home, CLONE_NEWNET)
        os.close(home)
        os.close(there)
    return tun


def report(pipes: Sequence[Pipe]) -> dict[str, Any]:
    """Sums over all directions."""
    packets = sum(pipe.packets for pipe in pipes)
    return {
        "packets": packets,
        "bytes": sum(pipe.bytes for pipe in pipes),
        "lost": sum(pipe.lost for pipe in pipes),
        "mean_late_s": sum(pipe.late_s for pipe in pipes) / max(packets, 1),
        "most_late_s": max((pipe.most_late_s for pipe in pipes), default=0.0),
        "cpu_s": time.process_time(),
    }


def main() -> None:
    """See the top of the file."""
    with contextlib.suppress(OSError):
        os.nice(-10)  # a packet that waits for a busy core is late
    pipes = []
    for link in json.loads(sys.stdin.readline()):
        low, high = (open_device(namespace, link["device"]) for namespace in link["ends"])
        pipes += [Pipe(low, high, link["delay_s"]), Pipe(high, low, link["delay_s"])]
    print("ready", flush=True)
    relay(pipes, sys.stdin.fileno())
    print(json.dumps(report(pipes)), flush=True)


if __name__ == "__main__":
    main()
