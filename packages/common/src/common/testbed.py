"""The sites of a ClusterSpec on one machine with real links between them: network namespaces, shaped by the kernel.

    with emulated_sites(cluster) as sites:
        process = sites.start("east", [sys.executable, "worker.py"])

Each site is a network namespace with one address. Each link is a pair of devices, one in either namespace: `tc tbf`
gives the rate, netem the delay where the kernel has it; else the devices are TUNs and `common.testbed_relay` carries
their packets late. Packets take the routes of `common.messages.Routes`. Nothing outside can reach a namespace.

Without root, `ip`, `tc` or TUN the sites are plain processes on loopback and messages wait as long as `common.links`
books; `sites.record()` says which of the two it was, and why.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from common.config import ConfigError
from common.messages import Routes
from common.spec import ClusterSpec, Link

Network = Literal["auto", "kernel", "calibrated-wait"]
PREFIX = "strata"
NAMESPACES = Path("/run/netns")
MTU = 3000
"""Jumbo frames: half of the packets that a Python relay must touch."""
QUEUE_BYTES = 64 * 2**20
"""A full queue would drop packets and TCP would back off; a sender is held back by its socket buffer instead."""
NETEM_PACKETS = 100_000
SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/tcp_slow_start_after_idle": "0",  # training pauses between bursts; a real job tunes this too
    "ipv4/tcp_rmem": "4096 4194304 33554432",
    "ipv4/tcp_wmem": "4096 4194304 33554432",
}
INITIAL_WINDOW = 300
"""Segments in flight from the first round trip on: long-lived tuned connections, not slow start."""


# -- what a link looks like to the kernel: pure ------------------------------------------------------------------------


def address(site: int) -> str:
    """The one address of the site with this index."""
    return f"10.77.{site // 250}.{site % 250 + 1}"


def burst_bytes(link: Link) -> int:
    """Bucket of the token filter: two packets, or 0.2 ms of the rate where that is more."""
    return max(2 * MTU, int(link.bandwidth_gbps * 1e9 / 8 * 0.0002))


def shaping_commands(namespace: str, device: str, link: Link, netem: bool) -> list[list[str]]:
    """`tc` for one end of a link. Rate only, or netem with the rate below it."""
    tc = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
    rate = [
        "tbf", "rate", f"{round(link.bandwidth_gbps * 1e9)}bit", "burst", str(burst_bytes(link)),
        "limit", str(QUEUE_BYTES),
    ]  # fmt: skip
    if not netem:
        return [[*tc, "root", *rate]]
    delay = ["netem", "delay", f"{link.latency_us:g}us", "limit", str(NETEM_PACKETS)]
    return [[*tc, "root", "handle", "1:", *delay], [*tc, "parent", "1:1", "handle", "10:", *rate]]


def route_commands(cluster: ClusterSpec, namespaces: Sequence[str]) -> list[list[str]]:
    """`ip route` for every ordered pair of sites: out by the first link of the least-latency route."""
    names = [site.name for site in cluster.sites]
    routes = Routes(cluster)
    commands = []
    for src, src_name in enumerate(names):
        for dst, dst_name in enumerate(names):
            if src == dst:
                continue
            link, direction = routes(src_name, dst_name).hops[0]
            neighbour = names.index(cluster.links[link].between[1 - direction])
            commands.append([
                "ip", "-n", namespaces[src], "route", "add", address(dst), "via", address(neighbour), "dev",
                f"link{link}", "onlink", "src", address(src), "initcwnd", str(INITIAL_WINDOW), "initrwnd",
                str(INITIAL_WINDOW),
            ])  # fmt: skip
    return commands


def owner_tag(pid: int) -> str:
    """`<pid>-<start time>`: a number that was given out again is told apart from its dead owner."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{pid}-{fields[19]}"


def is_left_over(namespace: str) -> bool:
    """Whether a namespace has our kind of name and the process that made it is gone."""
    match = re.fullmatch(rf"{PREFIX}-((\d+)-\d+)-\d+", namespace)
    if not match:
        return False
    try:
        return owner_tag(int(match[2])) != match[1]
    except OSError:
        return True


# -- what can be had here ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ability:
    """What this machine can shape links with."""

    kernel: bool
    netem: bool
    reason: str
    """Why not, if not."""


def ability() -> Ability:
    """Try it in a namespace that is gone afterwards."""
    if os.geteuid() != 0:
        return Ability(False, False, "not root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return Ability(False, False, f"no {' and no '.join(missing)} (package iproute2)")
    name = f"{PREFIX}-{owner_tag(os.getpid())}-9999"
    try:
        _call(["ip", "netns", "add", name])
    except ConfigError as error:
        return Ability(False, False, str(error))
    try:
        netem = _works(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
        if netem:
            _call(["tc", "-n", name, "qdisc", "del", "dev", "lo", "root"])
        tbf = ["tbf", "rate", "1mbit", "burst", "9kb", "limit", "1mb"]
        if not _works(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *tbf]):
            return Ability(False, netem, "the kernel has no tbf")
        if not netem and not Path("/dev/net/tun").exists():
            return Ability(False, netem, "the kernel has neither netem nor /dev/net/tun")
    finally:
        _works(["ip", "netns", "del", name])
    return Ability(True, netem, "")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def _works(command: Sequence[str]) -> bool:
    return _run(command).returncode == 0


def _call(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise ConfigError(f"testbed: {' '.join(command)}: {done.stderr.strip() or done.returncode}")


def remove_left_overs() -> list[str]:
    """End what dead runs left running in their namespaces, remove these, and return their names."""
    if not NAMESPACES.exists():
        return []
    found = [path.name for path in NAMESPACES.iterdir() if is_left_over(path.name)]
    for name in found:
        _remove(name)
    return found


def _remove(namespace: str) -> None:
    for pid in _run(["ip", "netns", "pids", namespace]).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _works(["ip", "netns", "del", namespace])


# -- the sites ---------------------------------------------------------------------------------------------------------


@dataclass
class EmulatedSites:
    """Running sites; made by `emulated_sites`."""

    cluster: ClusterSpec
    network: Literal["kernel", "calibrated-wait"]
    reason: str
    """Why links are not shaped by the kernel; empty if they are."""
    netem: bool = False
    namespaces: tuple[str, ...] = ()
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    relay: subprocess.Popen[str] | None = None
    relay_report: dict[str, Any] = field(default_factory=dict)
    """What the relay did; known once the sites are down."""

    def start(self, site: str, command: Sequence[str], **popen: Any) -> subprocess.Popen[str]:
        """Start a process at a site, with pipes for input and output; it ends with the sites at the latest.

        It has a session of its own: Ctrl-C reaches the caller alone, which then ends everything in order.

        Raises:
            KeyError: no such site.
        """
        index = [s.name for s in self.cluster.sites].index(self.cluster.site(site).name)
        prefix = ["ip", "netns", "exec", self.namespaces[index]] if self.namespaces else []
        environment = {**os.environ, **popen.pop("env", {}), "GLOO_SOCKET_IFNAME": self._interface(site)}
        process = subprocess.Popen(
            [*prefix, *command], text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True, **popen,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def _interface(self, site: str) -> str:
        ours = (f"link{i}" for i, link in enumerate(self.cluster.links) if site in link.between)
        return next(ours, "lo") if self.namespaces else "lo"

    def address(self, site: str) -> str:
        """Where other sites reach processes of this site."""
        index = [s.name for s in self.cluster.sites].index(site)
        return address(index) if self.namespaces else "127.0.0.1"

    def record(self) -> dict[str, str]:
        """How the links are emulated, for a run's record."""
        if self.network == "calibrated-wait":
            return {"network": self.network, "reason": self.reason}
        delay = "netem" if self.netem else "TUN relay" if self.relay else "none"
        return {"network": "kernel", "rate": "tbf", "delay": delay}

    # -- up and down ----------------------------------------------------------------------------------------------

    def _up(self) -> None:
        for index in range(len(self.cluster.sites)):
            name = f"{PREFIX}-{owner_tag(os.getpid())}-{index}"
            _call(["ip", "netns", "add", name])
            self.namespaces = (*self.namespaces, name)
            _call(["ip", "-n", name, "link", "set", "lo", "up"])
            settings = "; ".join(f"echo '{value}' > /proc/sys/net/{key}" for key, value in SETTINGS.items())
            _call(["ip", "netns", "exec", name, "sh", "-ec", settings])
        self._make_devices()
        for index, link in enumerate(self.cluster.links):
            for end in link.between:
                site = [s.name for s in self.cluster.sites].index(end)
                namespace, device = self.namespaces[site], f"link{index}"
                _call(["ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "txqueuelen", "20000", "up"])
                _call(["ip", "-n", namespace, "addr", "add", f"{address(site)}/32", "dev", device])
                for command in shaping_commands(namespace, device, link, self.netem):
                    _call(command)
        for command in route_commands(self.cluster, self.namespaces):
            _call(command)

    def _make_devices(self) -> None:
        where = {site.name: self.namespaces[i] for i, site in enumerate(self.cluster.sites)}
        late = []
        for index, link in enumerate(self.cluster.links):
            low, high = (where[end] for end in link.between)
            device = f"link{index}"
            if self.netem or link.latency_us == 0:
                _call(
                    ["ip", "link", "add", device, "netns", low, "type", "veth", "peer", "name", device, "netns", high]
                )
            else:
                late.append({"ends": [low, high], "device": device, "delay_s": link.latency_us * 1e-6})
        if late:
            command = [sys.executable, "-m", "common.testbed_relay"]
            pipe = subprocess.PIPE
            self.relay = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, start_new_session=True)
            assert self.relay.stdin is not None
            assert self.relay.stdout is not None
            self.relay.stdin.write(json.dumps(late) + "\n")
            self.relay.stdin.flush()
            if self.relay.stdout.readline().strip() != "ready":
                raise ConfigError("testbed: the relay could not make its TUN devices; its error is above")

    def _down(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            _end(process)
        if self.relay is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
                told, _ = self.relay.communicate(timeout=5)
                self.relay_report = json.loads(told)
            if self.relay.poll() is None:
                self.relay.kill()
                self.relay.wait()
        for name in self.namespaces:
            _remove(name)
        self.namespaces = ()


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for a process that was told to end, insist after 5 s, and close its pipes."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):  # closing flushes, and the reader is gone
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def emulated_sites(cluster: ClusterSpec, network: Network = "auto") -> Iterator[EmulatedSites]:
    """Bring the sites up, and take everything down again: at the end, after an error, and on SIGTERM.

    Args:
        cluster: sites and links.
        network: "kernel" shapes links or fails; "calibrated-wait" never tries; "auto" takes what can be had.

    Raises:
        ConfigError: "kernel" is wanted and cannot be had, or a device cannot be made.
    """
    able = Ability(False, False, "not wanted") if network == "calibrated-wait" else ability()
    if network == "kernel" and not able.kernel:
        raise ConfigError(f"testbed: links cannot be shaped here: {able.reason}; use network: auto, or run as root")
    kind: Literal["kernel", "calibrated-wait"] = "kernel" if able.kernel else "calibrated-wait"
    sites = EmulatedSites(cluster, kind, able.reason, able.netem)
    with _terminated_as_exit():
        try:
            if able.kernel:
                remove_left_overs()
                sites._up()
            yield sites
        finally:
            sites._down()


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack like an exception, so that `finally` runs (main thread only)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
