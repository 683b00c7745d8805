"""Network-layer technologies put together: what rate GPU pairs reach over one link, and what limits them.

    link = NetworkLink(gbps=400, rtt_s=0.021, paths=16, loss=1e-6)
    effective(link, Technology(queue_pairs=16, balancing="e-ecmp"), pairs=8).gbps

The mechanisms are in `network_ecmp.py` (balancing over paths), `network_loss.py` (windows, loss, TCP, buffers) and
`network_classes.py` (priorities, oversubscription, compression, outer optimizers), each with its formula and source.
They compose as a chain: capacity that is left, times balance, times what loss recovery lets through, and no more than
the window lets out. Latency, collectives (`collectives.py`) and schedules come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from common.config import Config
from scale_across import network_loss
from scale_across.collectives import chunked_hierarchical_all_reduce_s, hierarchical_phase_s, ring_phase_s
from scale_across.network_classes import COMPRESSIONS, oversubscribed_gbps
from scale_across.network_ecmp import ecmp_efficiency, qp_scaled_flows, remaining_gbps, spray_efficiency

__all__ = [
    "Effective",
    "NetworkLink",
    "Technology",
    "chunked_hierarchical_all_reduce_s",
    "effective",
    "effective_gbps",
    "hierarchical_phase_s",
    "ring_phase_s",
]


class NetworkLink(Config):
    """One hop between two domains, all its parallel cables together, one direction."""

    gbps: float = Field(gt=0)
    rtt_s: float = Field(ge=0)
    paths: int = Field(default=1, gt=0)
    """Equal cables or routes that flows are spread over."""
    loss: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a packet is lost."""
    buffer_bytes: float | None = Field(default=None, ge=0)
    """At the bottleneck; matters to TCP only. None: deep enough."""
    failed_paths: int = Field(default=0, ge=0)
    oversubscription: float = Field(default=1.0, ge=1)

    @model_validator(mode="after")
    def _alive(self) -> NetworkLink:
        if self.failed_paths >= self.paths:
            raise ValueError(f"failed_paths {self.failed_paths}: of {self.paths} paths at least one must be left")
        return self


class Technology(Config):
    """How traffic is sent over a link. The defaults are NCCLX's across tiers (arXiv 2510.20171)."""

    transport: Literal["go-back-n", "selective-repeat", "tcp"] = "selective-repeat"
    balancing: Literal["ecmp", "e-ecmp", "spray", "adaptive-spray"] = "e-ecmp"
    planes: int = Field(default=1, gt=0)
    """Planes that do not mix; 1 is spread aggregation."""
    queue_pairs: int = Field(default=16, gt=0)
    """Per pair of GPUs; connections for TCP."""
    messages: int = Field(default=128, gt=0)
    """Outstanding per queue pair."""
    message_bytes: int = Field(default=65536, gt=0)
    packet_bytes: int = Field(default=4096, gt=0)
    """Payload of one packet; the segment size for TCP."""
    synchronised: bool = False
    """TCP flows that halve together, as those of one collective tend to."""
    compression: str = "bf16"
    """Of gradients; a key of network_classes.COMPRESSIONS. Counts as a faster link for the bytes of bf16."""

    @model_validator(mode="after")
    def _known(self) -> Technology:
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression {self.compression!r}: unknown; known are {', '.join(COMPRESSIONS)}")
        return self


@dataclass(frozen=True)
class Effective:
    """What all pairs together reach."""

    gbps: float
    """Of bf16 payload: compression included."""
    wire_gbps: float
    limit: str
    """What holds it back most: `capacity`, `balancing`, `loss`, `window` or `buffer`."""
    factors: dict[str, float]
    """Share of the healthy link's capacity that remains after each mechanism alone."""


def effective(link: NetworkLink, technology: Technology, pairs: int = 1, offered: float = 1.0) -> Effective:
    """Rate of `pairs` GPU pairs that send at once over `link`; `offered` is their demand over its capacity."""
    nominal = oversubscribed_gbps(link.gbps, link.oversubscription)
    healthy = remaining_gbps(nominal, link.paths, link.failed_paths, technology.planes, technology.planes == 1)
    alive = link.paths - link.failed_paths
    balance = _balance(technology, alive, pairs, offered)
    sending_gbps = max(healthy * balance, 1e-12)
    window = technology.messages * technology.message_bytes
    if technology.transport == "tcp":
        factors = _tcp(link, technology, pairs, sending_gbps)
    else:
        limit = float(network_loss.window_limit_gbps(pairs * technology.queue_pairs, 1, window, link.rtt_s))
        recovery = _rdma_recovery(link, technology, pairs, min(sending_gbps, limit))
        factors = {"window": min(1.0, limit / sending_gbps), "loss": recovery}
    wire = sending_gbps * factors["window"] * factors["loss"] * factors.get("buffer", 1.0)
    factors = {"capacity": healthy / link.gbps, "balancing": balance, **factors}
    ratio = COMPRESSIONS[technology.compression].ratio(16)
    worst = min(factors, key=lambda name: factors[name])
    return Effective(wire * ratio, wire, worst if factors[worst] < 1 else "capacity", factors)


def effective_gbps(link: NetworkLink, technology: Technology, pairs: int = 1, offered: float = 1.0) -> float:
    """The rate alone; see `effective`."""
    return effective(link, technology, pairs, offered).gbps


def _balance(technology: Technology, paths: int, pairs: int, offered: float) -> float:
    if technology.balancing in ("spray", "adaptive-spray"):
        packets = -(-technology.message_bytes * technology.messages * technology.queue_pairs // technology.packet_bytes)
        return spray_efficiency(packets * pairs, paths, offered, technology.balancing == "adaptive-spray")
    hashed = technology.balancing == "e-ecmp" or technology.transport == "tcp"  # TCP connections differ in their ports
    return ecmp_efficiency(qp_scaled_flows(pairs, technology.queue_pairs, hashed), paths, offered)


def _rdma_recovery(link: NetworkLink, technology: Technology, pairs: int, gbps: float) -> float:
    if technology.transport == "selective-repeat":
        return float(network_loss.selective_repeat_efficiency(link.loss))
    each_s = network_loss.packet_s(gbps, technology.packet_bytes, pairs * technology.queue_pairs)
    return float(network_loss.go_back_n_efficiency(link.loss, link.rtt_s, each_s))


def _tcp(link: NetworkLink, technology: Technology, pairs: int, gbps: float) -> dict[str, float]:
    """Window, loss and buffer as shares of what the balanced paths carry."""
    connections = pairs * technology.queue_pairs
    window = technology.messages * technology.message_bytes
    limit = float(network_loss.window_limit_gbps(connections, 1, window, link.rtt_s))
    open_gbps = min(gbps, limit)
    lossy = open_gbps
    if link.loss > 0 and link.rtt_s > 0:
        lossy = float(
            network_loss.parallel_tcp_gbps(
                open_gbps, connections, link.loss, link.rtt_s, technology.packet_bytes, window
            )
        )
    factors = {"window": open_gbps / gbps, "loss": lossy / open_gbps, "buffer": 1.0}
    fills = lossy >= 0.99 * gbps and link.rtt_s > 0
    if link.buffer_bytes is not None and fills:  # the connections fill the link, so their losses happen in its buffer
        bdp = link.buffer_bytes / float(network_loss.window_needed_bytes(gbps, link.rtt_s))
        shared = network_loss.synchronised_utilisation(bdp)
        apart = network_loss.desynchronised_utilisation(bdp, connections)
        factors["buffer"] = float(shared if technology.synchronised else apart)
    return factors
