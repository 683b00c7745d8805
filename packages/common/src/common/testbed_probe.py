"""What the emulated links really carry: `python -m common.testbed_probe cluster.yaml` (root for shaped links).

For every link, round trips of one byte and the time of one large transfer, over plain TCP between its two sites.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from common.config import ConfigError, load
from common.spec import ClusterSpec, Link
from common.testbed import EmulatedSites, emulated_sites

TRIPS = 10


@dataclass(frozen=True)
class Measured:
    """One link, one direction."""

    round_trip_s: float
    """Median of one byte there and one back."""
    transfer_s: float
    """`nbytes` there and one byte back."""
    nbytes: int

    @property
    def rate_gbps(self) -> float:
        """Payload per second, without the round trip."""
        return self.nbytes * 8e-9 / (self.transfer_s - self.round_trip_s)


def measure(sites: EmulatedSites, link: Link, nbytes: int) -> Measured:
    """From the link's first site to its second.

    Raises:
        ConfigError: the sites are plain processes, so there is no link to measure.
    """
    if sites.network != "kernel":
        raise ConfigError(f"testbed: no shaped links to measure here: {sites.reason}")
    src, dst = link.between
    server = sites.start(dst, [sys.executable, "-m", "common.testbed_probe", "--serve", sites.address(dst)])
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    where = f"{sites.address(dst)}:{port}:{nbytes}"
    client = sites.start(src, [sys.executable, "-m", "common.testbed_probe", "--ask", where])
    told, _ = client.communicate(timeout=120)
    server.communicate(timeout=10)
    return Measured(**json.loads(told))


def serve(host: str) -> None:
    """Answer each byte that is 1 with one byte, until the client hangs up."""
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := peer.recv(1 << 20):
            if data[-1] == 1:
                peer.sendall(b"\1")


def ask(host: str, port: int, nbytes: int) -> Measured:
    """The client's half of `measure`."""
    with socket.create_connection((host, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip(size: int) -> float:
            start_s = time.monotonic()
            peer.sendall(bytes(size - 1) + b"\1")
            peer.recv(1)
            return time.monotonic() - start_s

        trips = [trip(1) for _ in range(TRIPS)]
        return Measured(statistics.median(trips), trip(nbytes), nbytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster", nargs="?", help="a ClusterSpec in YAML")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long the large transfer should take")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
    elif options.ask:
        host, port, nbytes = options.ask.split(":")
        print(json.dumps(asdict(ask(host, int(port), int(nbytes)))))
    elif options.cluster:
        cluster = load(options.cluster, ClusterSpec)
        with emulated_sites(cluster) as sites:
            print(f"emulation: {json.dumps(sites.record())}")
            for link in cluster.links if sites.network == "kernel" else ():
                got = measure(sites, link, max(1, int(link.bandwidth_gbps * 1e9 / 8 * options.seconds)))
                print(
                    f"{'--'.join(link.between)}: {got.rate_gbps * 1e3:.1f} Mb/s of {link.bandwidth_gbps * 1e3:g}, "
                    f"round trip {got.round_trip_s * 1e3:.2f} ms of {2e-3 * link.latency_us:g}"
                )
        if sites.relay_report:
            print(f"relay: {json.dumps(sites.relay_report)}")
    else:
        parser.error("name a cluster file")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
