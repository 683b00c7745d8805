"""Transports on long links: window limits, loss recovery, TCP, and the buffers in between.

Rates are in 10^9 bits per second. All functions take numbers or arrays that broadcast. p is the probability that a
packet is lost, round trips are in seconds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Numbers = npt.ArrayLike
Array = npt.NDArray[np.float64]


def window_limit_gbps(queue_pairs: Numbers, messages: Numbers, message_bytes: Numbers, rtt_s: Numbers) -> Array:
    """At most (queue pairs x outstanding messages x message size) are on the way in one round trip.

    NCCLX (arXiv 2510.20171), dynamic queue pair load balancing: 16 queue pairs, up to 128 messages across tiers.
    """
    window_bytes = np.asarray(queue_pairs, float) * np.asarray(messages, float) * np.asarray(message_bytes, float)
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(window_bytes * 8e-9 / np.asarray(rtt_s, float))


def window_needed_bytes(gbps: Numbers, rtt_s: Numbers) -> Array:
    """The bandwidth-delay product: what must be outstanding to fill the link."""
    return np.asarray(np.asarray(gbps, float) * np.asarray(rtt_s, float) * 1e9 / 8)


def packet_s(gbps: Numbers, packet_bytes: Numbers, queue_pairs: Numbers = 1) -> Array:
    """Seconds between packets of one queue pair when `queue_pairs` share the link equally."""
    return np.asarray(np.asarray(packet_bytes, float) * 8e-9 * np.asarray(queue_pairs, float) / np.asarray(gbps, float))


def go_back_n_efficiency(p: Numbers, rtt_s: Numbers, packet_time_s: Numbers) -> Array:
    """(1 - p) / (1 + p RTT / t): a loss costs the packet and all sent in the round trip until it is noticed.

    Bertsekas and Gallager, Data Networks, section 2.4 (with a window that fills the link). RoCE NICs recover like this
    unless they have selective repeat; a loss only rewinds its own queue pair, so pass that pair's packet time.
    """
    p, rounds = np.asarray(p, float), np.asarray(rtt_s, float) / np.asarray(packet_time_s, float)
    return np.asarray((1.0 - p) / (1.0 + p * rounds))


def selective_repeat_efficiency(p: Numbers) -> Array:
    """1 - p: only what was lost is sent again (Bertsekas and Gallager, section 2.4.3; IRN, SIGCOMM 2018)."""
    return np.asarray(1.0 - np.asarray(p, float))


def mathis_gbps(p: Numbers, rtt_s: Numbers, mss_bytes: Numbers = 1460, delayed_acks: bool = False) -> Array:
    """One TCP connection: MSS / RTT x C / sqrt(p), C = sqrt(3/2), or sqrt(3/4) when every second packet is ACKed.

    Mathis, Semke, Mahdavi, Ott 1997, "The macroscopic behavior of the TCP congestion avoidance algorithm".
    """
    c = math.sqrt(0.75 if delayed_acks else 1.5)
    with np.errstate(divide="ignore"):
        rate = np.asarray(mss_bytes, float) * 8e-9 * c / (np.asarray(rtt_s, float) * np.sqrt(np.asarray(p, float)))
    return np.asarray(rate)


def pftk_gbps(
    p: Numbers,
    rtt_s: Numbers,
    mss_bytes: Numbers = 1460,
    window_bytes: Numbers = math.inf,
    timeout_s: Numbers = 0.2,
    acked: float = 2.0,
) -> Array:
    """One TCP connection with timeouts and a bounded window; the approximate form of Padhye et al. 1998, equation 32.

    min(Wmax / RTT, 1 / (RTT sqrt(2 b p / 3) + T0 min(1, 3 sqrt(3 b p / 8)) p (1 + 32 p^2))) segments a second, b
    packets per ACK, T0 the first retransmission timeout.
    """
    p, rtt = np.asarray(p, float), np.asarray(rtt_s, float)
    slow = rtt * np.sqrt(2 * acked * p / 3)
    timeout = np.asarray(timeout_s, float) * np.minimum(1.0, 3 * np.sqrt(3 * acked * p / 8)) * p * (1 + 32 * p**2)
    with np.errstate(divide="ignore"):
        segments = np.asarray(mss_bytes, float) / (slow + timeout)
        bounded = np.minimum(segments, np.asarray(window_bytes, float) / rtt)
    return np.asarray(bounded * 8e-9)


def parallel_tcp_gbps(
    capacity_gbps: Numbers,
    connections: Numbers,
    p: Numbers,
    rtt_s: Numbers,
    mss_bytes: Numbers = 1460,
    window_bytes: Numbers = math.inf,
) -> Array:
    """n connections get n times one's rate, up to the link's (Hacker, Athey, Noble 2002, "The end-to-end performance
    effects of parallel TCP sockets on a lossy wide-area network"). Holds while the loss is not their own doing.
    """
    one = pftk_gbps(p, rtt_s, mss_bytes, window_bytes)
    return np.asarray(np.minimum(np.asarray(capacity_gbps, float), np.asarray(connections, float) * one))


def buffer_needed_bytes(gbps: Numbers, rtt_s: Numbers, flows: Numbers = 1) -> Array:
    """RTT x C / sqrt(n): enough for n desynchronised flows (Appenzeller, Keslassy, McKeown, SIGCOMM 2004)."""
    return np.asarray(window_needed_bytes(gbps, rtt_s) / np.sqrt(np.asarray(flows, float)))


def synchronised_utilisation(buffer_bdp: Numbers) -> Array:
    """Utilisation of a link by loss-driven flows that all halve at once, with a buffer of b bandwidth-delay products.

    The windows together swing between (1 + b) / 2 and 1 + b. Below 1 the link runs at the window's rate and a round
    trip takes 1; above it is full and a round trip takes the window. Delivered over elapsed time is
    [(1 - ((1+b)/2)^2)/2 + ((1+b)^2 - 1)/2] / [(1 - b)/2 + ((1+b)^2 - 1)/2]: 3/4 without a buffer, 1 from b = 1 on.
    """
    b = np.minimum(1.0, np.asarray(buffer_bdp, float))
    full = ((1 + b) ** 2 - 1) / 2
    return np.asarray(((1 - ((1 + b) / 2) ** 2) / 2 + full) / ((1 - b) / 2 + full))


def desynchronised_utilisation(buffer_bdp: Numbers, flows: Numbers) -> Array:
    """Lower bound for n flows that lose packets at different times: erf(3 sqrt(3) / (2 sqrt(2)) x b sqrt(n) / (1 + b)).

    Appenzeller et al. 2004, section 3: windows add up to a Gaussian of deviation (1 + b) / (3 sqrt(3 n)). Never less
    than `synchronised_utilisation`, their worst case.
    """
    b, n = np.asarray(buffer_bdp, float), np.asarray(flows, float)
    bound = np.vectorize(math.erf, otypes=[float])(3 * math.sqrt(3) / (2 * math.sqrt(2)) * b * np.sqrt(n) / (1 + b))
    return np.asarray(np.maximum(bound, synchronised_utilisation(b)))
