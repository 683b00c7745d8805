"""Load balancing over equal paths: hashing flows (ECMP), more flows per pair (QP scaling), spraying packets, planes.

A collective waits for its slowest flow, so its time is that of the fullest path. With every flow hashed to one of m
equal paths at random, the fullest path holds as many flows as the fullest bin when n balls fall into m bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

EXACT_FLOWS = 8192
"""Above this many balls the asymptotic mean is used, which is some 5 % too high there."""
Array = npt.NDArray[np.float64]


@lru_cache(maxsize=4096)
def max_load_cdf(flows: int, paths: int) -> Array:
    """[flows + 1] P(fullest of `paths` bins holds at most k balls), for k = 0 ... flows; exact.

    P(max <= k) = n! / m^n [x^n] (sum_{i<=k} x^i / i!)^m (e.g. Flajolet and Sedgewick, Analytic Combinatorics, II.3).
    Bins are filled as independent Poisson variables of mean n / m, cut at k, and conditioned on the sum n: all terms
    are probabilities, so the power may be taken by FFT: absolute errors are some 1e-13.
    """
    mean = flows / paths
    counts = np.arange(flows + 1)
    log_factorials = np.array([math.lgamma(i + 1.0) for i in range(flows + 1)])
    poisson = np.exp(counts * math.log(mean) - mean - log_factorials)
    all_flows = math.exp(flows * math.log(flows) - flows - math.lgamma(flows + 1.0))
    cdf = np.zeros(flows + 1)
    length = 64 + 4 * flows  # sums of 4 n more than n would alias onto n; their probability is below 1e-30
    for k in range(-(-flows // paths), flows + 1):
        powered = np.fft.irfft(np.fft.rfft(poisson[: k + 1], length) ** paths, length)
        cdf[k] = min(1.0, max(0.0, powered[flows] / all_flows))
        if cdf[k] > 1.0 - 1e-12:
            cdf[k:] = 1.0
            break
    return cdf


def expected_max_load(flows: int, paths: int) -> float:
    """Mean number of flows on the fullest path; exact up to EXACT_FLOWS flows.

    Beyond: n/m + sqrt(2 (n/m) ln m), the leading terms for n >> m ln m (Raab and Steger 1998, "Balls into bins").
    """
    if paths == 1 or flows <= 1:
        return float(flows)
    if flows > EXACT_FLOWS:
        return flows / paths + math.sqrt(2.0 * flows / paths * math.log(paths))
    return float(np.sum(1.0 - max_load_cdf(flows, paths)[:-1]))


def ecmp_efficiency(flows: int, paths: int, offered: float = 1.0) -> float:
    """Throughput of synchronised flows over `paths`, as a share of what perfect balance would carry.

    `offered` is demand over capacity of all paths together. A transfer takes E[max(1, offered x L m / n)] times its
    time on an idle path, L the fullest path's load; perfect balance takes max(1, offered). At 1.0 that is
    (n / m) / E[L].
    """
    if paths == 1 or flows == 0:
        return 1.0
    ideal = max(1.0, offered)
    if flows > EXACT_FLOWS:
        return ideal / max(1.0, offered * expected_max_load(flows, paths) * paths / flows)
    loads = np.arange(flows + 1)
    share = np.diff(max_load_cdf(flows, paths), prepend=0.0)
    return float(ideal / np.sum(share * np.maximum(1.0, offered * loads * paths / flows)))


def qp_scaled_flows(pairs: int, queue_pairs: int, hash_queue_pair: bool = True) -> int:
    """Distinct flows that switches see when every pair of GPUs spreads its messages over `queue_pairs` queue pairs.

    E-ECMP hashes the destination queue pair too (Gangidi et al., SIGCOMM 2024, "RDMA over Ethernet for distributed AI
    training at Meta scale": up to 40 % faster all-reduce than plain ECMP); plain ECMP sees one flow per pair.
    """
    return pairs * queue_pairs if hash_queue_pair else pairs


def spray_efficiency(packets: int, paths: int, offered: float = 1.0, adaptive: bool = False) -> float:
    """Packet spraying: every packet takes a path of its own, so packets of one round are the balls (Dixit et al.,
    INFOCOM 2013, "On the impact of packet spraying in data center networks"). Adaptive spraying takes the emptiest
    path and stays balanced to one packet: ceil(n / m) on the fullest. Receivers must accept packets out of order.
    """
    if adaptive:
        fullest = -(-packets // paths)
        return max(1.0, offered) / max(1.0, offered * fullest * paths / packets)
    return ecmp_efficiency(packets, paths, offered)


def planar_gbps(capacity_P: Sequence[float], load_P: Sequence[float]) -> float:
    """Planes that do not mix (Llama 3's and NCCLX's rail or plane-aligned aggregation): the slowest plane decides.

    `load_P` are the shares of the traffic per plane. All traffic finishes together with its slowest plane, so
    throughput is min_p capacity_p / load_p, loads normalised to 1.
    """
    capacity, load = np.asarray(capacity_P, float), np.asarray(load_P, float)
    used = load > 0
    return float(np.min(capacity[used] / load[used]) * load.sum()) if used.any() else float(capacity.sum())


def spread_gbps(capacity_P: Sequence[float], flows: int, offered: float = 1.0) -> float:
    """Every flow may use every plane: capacities add up, and flows collide over all of them as under ECMP."""
    return float(np.sum(capacity_P)) * ecmp_efficiency(flows, int(np.count_nonzero(capacity_P)), offered)


def remaining_gbps(gbps: float, links: int, failed: int, planes: int = 1, rebalanced: bool = True) -> float:
    """Capacity after `failed` of `links` equal links are lost.

    Spread, or planar once traffic is striped anew over what is left (`rebalanced`): the surviving share. Planar
    before that: each plane still carries its share, so all wait for the plane that lost most; failures fall
    into one plane as far as it has links (worst case).
    """
    alive = max(0, links - failed)
    if rebalanced or planes == 1:
        return gbps * alive / links
    per_plane = links / planes
    return gbps * max(0.0, 1.0 - failed / per_plane)
