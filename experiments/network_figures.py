"""Plot throughput against the parameter of each network-layer technology, into docs/figures/.

.venv/bin/python experiments/network_figures.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from scale_across import network_classes as classes
from scale_across import network_loss as loss
from scale_across.collectives import chunked_hierarchical_all_reduce_s
from scale_across.network import NetworkLink, Technology, effective_gbps
from scale_across.network_ecmp import ecmp_efficiency, planar_gbps, spray_efficiency, spread_gbps

LOSSES = np.logspace(-8, -1.3, 60)
RTTS_S = np.logspace(-5, -1, 60)


def balancing(axes: Any) -> None:
    """ECMP collisions, QP scaling and spraying against the number of GPU pairs that send, 16 paths."""
    pairs = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for queue_pairs in (1, 4, 16):
        label = "ECMP, 1 flow per pair" if queue_pairs == 1 else f"E-ECMP, {queue_pairs} queue pairs"
        axes.plot(pairs, [ecmp_efficiency(n * queue_pairs, 16) for n in pairs], marker=".", label=label)
    axes.plot(pairs, [spray_efficiency(n * 256, 16) for n in pairs], "--", label="spraying, 256 packets")
    axes.plot(pairs, [spray_efficiency(n * 256, 16, adaptive=True) for n in pairs], ":", label="adaptive spraying")
    axes.set(xscale="log", xlabel="GPU pairs over 16 paths", ylabel="share of all paths", ylim=(0, 1.05))


def window(axes: Any) -> None:
    """Rate of one pair on a 400 Gb/s port against the round trip, by window (64 KiB messages)."""
    for queue_pairs, messages in ((1, 16), (4, 32), (16, 128)):
        limit = np.minimum(400, loss.window_limit_gbps(queue_pairs, messages, 65536, RTTS_S))
        axes.plot(RTTS_S * 1e3, limit, label=f"{queue_pairs} queue pairs x {messages} messages")
    axes.set(xscale="log", yscale="log", xlabel="round trip (ms)", ylabel="Gb/s of a 400 Gb/s port")


def recovery(axes: Any) -> None:
    """Go-back-N and selective repeat on 400 Gb/s against loss."""
    for rtt_s, label in ((5e-5, "50 us"), (2e-3, "2 ms"), (21e-3, "21 ms")):
        packet_s = loss.packet_s(400, 4096)
        axes.plot(LOSSES, loss.go_back_n_efficiency(LOSSES, rtt_s, packet_s), label=f"go-back-N, {label}")
    packet_s = loss.packet_s(400, 4096, 16)
    axes.plot(
        LOSSES, loss.go_back_n_efficiency(LOSSES, 21e-3, packet_s), "--", label="go-back-N, 21 ms, 16 queue pairs"
    )
    axes.plot(LOSSES, loss.selective_repeat_efficiency(LOSSES), "k:", label="selective repeat")
    axes.set(xscale="log", xlabel="packet loss", ylabel="share of the link", ylim=(0, 1.05))


def tcp(axes: Any) -> None:
    """Parallel TCP on a 5 Gb/s path of 40 ms against loss, and the formula of Mathis for one connection."""
    for connections in (1, 8, 64):
        rate = loss.parallel_tcp_gbps(5, connections, LOSSES, 0.04)
        axes.plot(LOSSES, rate, label=f"{connections} connections (PFTK)")
    axes.plot(LOSSES, np.minimum(5, loss.mathis_gbps(LOSSES, 0.04)), "k:", label="1 connection (Mathis)")
    axes.set(xscale="log", yscale="log", xlabel="packet loss", ylabel="Gb/s of 5 Gb/s, 40 ms")


def buffers(axes: Any) -> None:
    """Utilisation by TCP against buffer depth."""
    depth = np.logspace(-3, 0.3, 80)
    axes.plot(depth, loss.synchronised_utilisation(depth), "k", label="synchronised")
    for flows in (4, 64, 1024):
        axes.plot(depth, loss.desynchronised_utilisation(depth, flows), label=f"{flows} flows, lower bound")
    axes.set(xscale="log", xlabel="buffer (bandwidth-delay products)", ylabel="utilisation", ylim=(0.7, 1.02))


def failures(axes: Any) -> None:
    """Capacity left when links of one plane fail: 4 planes of 8 links, planar against spread."""
    failed = list(range(9))
    planes = [[8.0 - n, 8, 8, 8] for n in failed]
    axes.plot(failed, [planar_gbps(c, [1, 1, 1, 1]) / 32 for c in planes], label="planar, traffic as before")
    axes.plot(failed, [planar_gbps(c, c) / 32 for c in planes], label="planar, striped anew")
    axes.plot(failed, [spread_gbps(c, 1024) / 32 for c in planes], label="spread, 1,024 flows")
    axes.set(xlabel="links lost of 8 in one of 4 planes", ylabel="share of capacity", ylim=(0, 1.05))


def sharing(axes: Any) -> None:
    """What a pipeline message's class gets beside gradients that want the whole link."""
    demand = np.linspace(0, 100, 51)
    strict = [classes.strict_priority_gbps(100, [d, 100])[0] for d in demand]
    fair = [classes.weighted_classes_gbps(100, [d, 100], [1, 1])[0] for d in demand]
    weighted = [classes.weighted_classes_gbps(100, [d, 100], [3, 1])[0] for d in demand]
    crossing = [classes.oversubscribed_gbps(100, 2.8, share / 100) for share in demand]
    axes.plot(demand, strict, label="strict priority")
    axes.plot(demand, weighted, label="weight 3 : 1")
    axes.plot(demand, fair, label="one class")
    axes.plot(demand, crossing, "k:", label="oversubscribed 2.8 : 1, against % crossing")
    axes.set(xlabel="demand of the class (Gb/s); % crossing", ylabel="Gb/s of 100")


def collectives(axes: Any) -> None:
    """All-reduce of 1 GB over 2 sites x 8 GPUs: 50 and 1.25 GB/s per GPU, 10.5 ms one way, against chunks."""
    chunks = [1, 2, 4, 8, 16, 32, 64, 128]
    for gbytes in (1.0, 8.0):
        times = [
            chunked_hierarchical_all_reduce_s([(8, 5e10, 5e-6), (2, 1.25e9, 0.0105)], gbytes * 1e9, n) for n in chunks
        ]
        axes.plot(chunks, [gbytes / t for t in times], marker=".", label=f"{gbytes:g} GB")
    axes.set(xscale="log", xlabel="chunks, each with its own latency", ylabel="GB/s reduced")


def outer(axes: Any) -> None:
    """Exposed seconds per step against inner steps; 405e9 parameters, 2 sites, 400 GB/s between them, steps of 10 s."""
    steps = [1, 3, 10, 30, 100, 300]
    for name in ("fp32", "bf16", "fp8-e4m3", "int4"):
        bits = classes.COMPRESSIONS[name].bits_per_value
        axes.plot(steps, [classes.diloco(405e9, 2, h, bits, 4e11, 0.02).exposed_s_per_step for h in steps], label=name)
    axes.set(xscale="log", yscale="log", xlabel="inner steps H (H > 1: another algorithm)", ylabel="exposed s per step")


def composed(axes: Any) -> None:
    """Everything together: 64 pairs on 3.2 Tb/s, 21 ms, 16 paths, one of them lost, against loss."""
    settings: dict[str, dict[str, Any]] = {
        "ECMP, go-back-N": {"balancing": "ecmp", "transport": "go-back-n"},
        "E-ECMP, go-back-N": {"transport": "go-back-n"},
        "E-ECMP, selective repeat": {},
        "sprayed, selective repeat": {"balancing": "adaptive-spray"},
        "TCP, 16 connections": {"transport": "tcp", "packet_bytes": 1460},
    }
    for label, values in settings.items():
        technology = Technology.model_validate(values)
        links = [NetworkLink(gbps=3200, rtt_s=0.021, paths=16, failed_paths=1, loss=float(p)) for p in LOSSES]
        axes.plot(LOSSES, [effective_gbps(link, technology, pairs=64) for link in links], label=label)
    axes.set(xscale="log", yscale="log", xlabel="packet loss", ylabel="Gb/s of 3,200")


FIGURES: dict[str, tuple[Callable[[Any], None], ...]] = {
    "network_balancing": (balancing, failures, sharing),
    "network_long_links": (window, recovery, tcp),
    "network_buffers_collectives": (buffers, collectives, outer),
    "network_composed": (composed,),
}


def main() -> None:
    """Write one SVG per group of technologies."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 8, "svg.hashsalt": "scale-across", "svg.fonttype": "none"})
    for name, panels in FIGURES.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
        for panel, cell in zip(panels, axes[0], strict=True):
            panel(cell)
            cell.grid(alpha=0.3)
            cell.legend(fontsize=7)
            cell.set_title(panel.__name__)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
