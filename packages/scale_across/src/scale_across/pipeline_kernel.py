"""The compiled loops behind `pipeline`: greedy construction, running a given order, annealing orders.

Arrays by stage S, place in a stage's order N, virtual stage V, unit U (one slice of one microbatch, u = m x slices +
k), kind K (0 F, 1 D, 2 W, 3 B = D and W). Link l is directed, its reverse is l + 1 for even l, l - 1 for odd; -1: none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@njit(cache=True, nogil=True)
def send(now: float, link: int, occupied_s: float, latency_s: float, free_L: Floats) -> float:
    """Book a message; returns its arrival. Link -1: at once."""
    if link < 0:
        return now
    begin = max(now, free_L[link])
    free_L[link] = begin + occupied_s
    return begin + occupied_s + latency_s


@njit(cache=True, nogil=True)
def best_of_stage(  # noqa: C901 -- one loop over chunks and kinds
    s: int,
    virtual_SC: Ints,
    units: int,
    slices: int,
    limit: int,
    held: int,
    hold_f: int,
    hold_d: int,
    reserve: int,
    free: float,
    next_KV: Ints,
    arrive_FVU: Floats,
    arrive_DVU: Floats,
    rank_KV: Floats,
    patience_s: float,
    jitter_U: Floats,
    turn: int,
) -> tuple[float, float, int, int]:
    """(start, rank, kind, virtual stage) of what a stage can start first, the lowest rank of equals; kind -1: nothing.

    A W waits when an F or D that memory allows comes within `patience_s`.
    """
    last = next_KV.shape[1] - 1
    chunks = virtual_SC.shape[1]
    best_start, best_rank, best_k, best_v = np.inf, np.inf, -1, -1
    first_s = np.inf  # the earliest F or D
    for c in range(chunks):
        v = virtual_SC[s, c]
        if v < 0:
            continue
        for k in range(3):
            done = next_KV[k, v]
            if done >= units:
                continue
            ready = 0.0
            if k == 0:
                spare = reserve if c < chunks - 1 else hold_d
                if held + hold_f + spare > limit:
                    continue
                ready = arrive_FVU[v, done]
            elif k == 1:
                unit = (done // slices) * slices + slices - 1 - done % slices
                if next_KV[0, v] <= unit or held + hold_d > limit:
                    continue
                ready = arrive_DVU[v, unit] if v < last else 0.0
            elif next_KV[1, v] <= done:
                continue
            begin = max(free, ready)
            if begin == np.inf:
                continue
            if k == 2:
                if held + hold_f <= limit and first_s < free + patience_s:
                    continue
            elif begin < first_s:
                first_s = begin
            rank = rank_KV[k, v] + jitter_U[(turn + 7 * k + 13 * v) % len(jitter_U)]
            if begin < best_start - 1e-12 or (begin < best_start + 1e-12 and rank < best_rank):
                best_start, best_rank, best_k, best_v = begin, rank, k, v
    return best_start, best_rank, best_k, best_v


@njit(cache=True, nogil=True)
def run_greedy(
    device_V: Ints,
    virtual_SC: Ints,
    units: int,
    slices: int,
    duration_KV: Floats,
    link_V: Ints,
    occupied_s: float,
    latency_s: float,
    inside_s_V: Floats,
    limit_S: Ints,
    hold_f: int,
    hold_d: int,
    reserve: int,
    rank_KV: Floats,
    patience_s: float,
    jitter_U: Floats,
    table_SN4: npt.NDArray[np.int32],
    start_SN: Floats,
) -> int:
    """Fill orders and start times; returns how many blocks ran (fewer than all: stuck for want of memory).

    At each step the stage that can start something first does so; see `best_of_stage` for what it takes.
    """
    stages = len(virtual_SC)
    virtuals = len(device_V)
    arrive_FVU = np.full((virtuals, units), np.inf)
    arrive_DVU = np.full((virtuals, units), np.inf)
    arrive_FVU[0, :] = 0.0
    next_KV = np.zeros((3, virtuals), np.int32)
    free_S = np.zeros(stages)
    held_S = np.zeros(stages, np.int32)
    place_S = np.zeros(stages, np.int32)
    free_L = np.zeros(2 * virtuals + 2)
    chosen_S = [(np.inf, np.inf, -1, -1)] * stages
    changed_S = np.ones(stages, np.bool_)
    for turn in range(3 * virtuals * units):
        best_s = -1
        for s in range(stages):
            if changed_S[s]:
                chosen_S[s] = best_of_stage(
                    s, virtual_SC, units, slices, limit_S[s], held_S[s], hold_f, hold_d, reserve, free_S[s], next_KV,
                    arrive_FVU, arrive_DVU, rank_KV, patience_s, jitter_U, turn,
                )  # fmt: skip
                changed_S[s] = False
            if chosen_S[s][2] >= 0:
                gap = chosen_S[s][0] - chosen_S[best_s][0] if best_s >= 0 else -np.inf
                if gap < -1e-12 or (gap < 1e-12 and chosen_S[s][1] < chosen_S[best_s][1]):
                    best_s = s
        if best_s < 0:
            return turn
        s = best_s
        begin, _, k, v = chosen_S[s]
        done = next_KV[k, v]
        unit = done if k == 0 else (done // slices) * slices + slices - 1 - done % slices
        end = begin + duration_KV[k, v]
        chunk = 0
        while virtual_SC[s, chunk] != v:
            chunk += 1
        at = place_S[s]
        table_SN4[s, at, 0], table_SN4[s, at, 1] = k, unit // slices
        table_SN4[s, at, 2], table_SN4[s, at, 3] = chunk, unit % slices
        start_SN[s, at] = begin
        place_S[s] = at + 1
        free_S[s] = end
        next_KV[k, v] = done + 1
        changed_S[s] = True
        if k == 0:
            held_S[s] += hold_f
            if v + 1 < virtuals:
                arrive_FVU[v + 1, unit] = send(end, link_V[v], occupied_s, latency_s, free_L) + inside_s_V[v]
                changed_S[device_V[v + 1]] = True
        elif k == 1:
            held_S[s] += hold_d
            if v > 0:
                link = link_V[v - 1]
                back = link + 1 - 2 * (link % 2) if link >= 0 else -1
                arrive_DVU[v - 1, unit] = send(end, back, occupied_s, latency_s, free_L) + inside_s_V[v - 1]
                changed_S[device_V[v - 1]] = True
        else:
            held_S[s] -= hold_f + hold_d
    return 3 * virtuals * units


@njit(cache=True, nogil=True)
def run_fixed(  # noqa: C901 -- one loop: two kinds of message, two kinds of transfer
    kind_SN: npt.NDArray[np.int8],
    unit_SN: Ints,
    virtual_SN: Ints,
    count_S: Ints,
    virtuals: int,
    units: int,
    slices: int,
    duration_KV: Floats,
    link_V: Ints,
    occupied_s: float,
    latency_s: float,
    rendezvous: bool,
    start_SN: Floats,
    end_SN: Floats,
) -> int:
    """Start and end times of given orders; returns how many blocks ran (fewer than all: a circular wait)."""
    stages = len(kind_SN)
    end_FVU = np.full((virtuals, units), -1.0)
    end_DVU = np.full((virtuals, units), -1.0)
    arrive_FVU = np.full((virtuals, units), -1.0)
    arrive_DVU = np.full((virtuals, units), -1.0)
    free_S = np.zeros(stages)
    posted_S = np.zeros(stages)  # end of the last F or D: from then on the next receive is posted
    place_S = np.zeros(stages, np.int32)
    free_L = np.zeros(2 * virtuals + 2)
    ran = 0
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while place_S[s] < count_S[s]:
                i = place_S[s]
                k, u, v = kind_SN[s, i], unit_SN[s, i], virtual_SN[s, i]
                ready = 0.0
                if k == 0 and v > 0:
                    if end_FVU[v - 1, u] < 0:
                        break
                    if rendezvous:
                        ready = send(max(end_FVU[v - 1, u], posted_S[s]), link_V[v - 1], occupied_s, latency_s, free_L)
                    else:
                        ready = arrive_FVU[v, u]
                elif (k == 1 or k == 3) and v < virtuals - 1:
                    if end_DVU[v + 1, u] < 0:
                        break
                    if rendezvous:
                        link = link_V[v]
                        back = link + 1 - 2 * (link % 2) if link >= 0 else -1
                        ready = send(max(end_DVU[v + 1, u], posted_S[s]), back, occupied_s, latency_s, free_L)
                    else:
                        ready = arrive_DVU[v, u]
                begin = max(free_S[s], ready)
                length = duration_KV[1, v] + duration_KV[2, v] if k == 3 else duration_KV[k, v]
                end = begin + length
                start_SN[s, i], end_SN[s, i] = begin, end
                free_S[s] = end
                if k != 2:
                    posted_S[s] = end
                if k == 0:
                    end_FVU[v, u] = end
                    if v + 1 < virtuals and not rendezvous:
                        arrive_FVU[v + 1, u] = send(end, link_V[v], occupied_s, latency_s, free_L)
                elif k == 1 or k == 3:
                    end_DVU[v, u] = end
                    if v > 0 and not rendezvous:
                        link = link_V[v - 1]
                        back = link + 1 - 2 * (link % 2) if link >= 0 else -1
                        arrive_DVU[v - 1, u] = send(end, back, occupied_s, latency_s, free_L)
                place_S[s] = i + 1
                ran += 1
                moved = True
    return ran


@njit(cache=True, nogil=True)
def number_units(
    kind_N: npt.NDArray[np.int8],
    virtual_N: Ints,
    count: int,
    slices: int,
    virtuals: int,
    limit: int,
    hold_f: int,
    hold_d: int,
    unit_N: Ints,
) -> bool:
    """Units of one stage's blocks, in their order per virtual stage; False if it breaks F, D, W order or memory."""
    next_KV = np.zeros((3, virtuals), np.int32)
    held = 0
    for i in range(count):
        k, v = kind_N[i], virtual_N[i]
        done = next_KV[k, v]
        unit = done if k == 0 else (done // slices) * slices + slices - 1 - done % slices
        if k == 0:
            held += hold_f
        elif k == 1:
            if next_KV[0, v] <= unit:
                return False
            held += hold_d
        else:
            if next_KV[1, v] <= done:
                return False
            held -= hold_f + hold_d
        if held > limit:
            return False
        next_KV[k, v] = done + 1
        unit_N[i] = unit
    return True


@njit(cache=True, nogil=True)
def anneal(
    kind_SN: npt.NDArray[np.int8],
    virtual_SN: Ints,
    count_S: Ints,
    virtuals: int,
    units: int,
    slices: int,
    duration_KV: Floats,
    link_V: Ints,
    occupied_s: float,
    latency_s: float,
    limit_S: Ints,
    hold_f: int,
    hold_d: int,
    target_s: float,
    proposals: int,
    heat_s: float,
    seed: int,
) -> float:
    """Improve orders in place: move one block of one stage, keep it if not later, or by chance while it is hot.

    Stops at `target_s`. Returns the makespan of the best orders, which are what is left in kind_SN and virtual_SN.
    """
    np.random.seed(seed)
    stages, width = kind_SN.shape
    unit_SN = np.zeros((stages, width), np.int32)
    start_SN, end_SN = np.zeros((stages, width)), np.zeros((stages, width))
    for s in range(stages):
        if not number_units(
            kind_SN[s], virtual_SN[s], count_S[s], slices, virtuals, limit_S[s], hold_f, hold_d, unit_SN[s]
        ):
            return np.inf
    total = count_S.sum()
    if run_fixed(
        kind_SN, unit_SN, virtual_SN, count_S, virtuals, units, slices, duration_KV, link_V, occupied_s, latency_s,
        False, start_SN, end_SN,
    ) < total:  # fmt: skip
        return np.inf
    now = end_SN.max()
    best = now
    best_kind, best_virtual = kind_SN.copy(), virtual_SN.copy()
    old_kind, old_virtual = np.zeros(width, np.int8), np.zeros(width, np.int32)
    for turn in range(proposals):
        heat = heat_s * (1.0 - turn / proposals)
        s = np.random.randint(stages)
        n = count_S[s]
        source = np.random.randint(n)
        reach = 1 + np.random.randint(8 if np.random.random() < 0.7 else n)
        target = source - reach if np.random.random() < 0.5 else source + reach
        target = min(max(target, 0), n - 1)
        if target == source:
            continue
        old_kind[:] = kind_SN[s]
        old_virtual[:] = virtual_SN[s]
        k, v = kind_SN[s, source], virtual_SN[s, source]
        step = 1 if target > source else -1
        for i in range(source, target, step):
            kind_SN[s, i], virtual_SN[s, i] = kind_SN[s, i + step], virtual_SN[s, i + step]
        kind_SN[s, target], virtual_SN[s, target] = k, v
        fits = number_units(kind_SN[s], virtual_SN[s], n, slices, virtuals, limit_S[s], hold_f, hold_d, unit_SN[s])
        if fits:
            ran = run_fixed(
                kind_SN, unit_SN, virtual_SN, count_S, virtuals, units, slices, duration_KV, link_V, occupied_s,
                latency_s, False, start_SN, end_SN,
            )  # fmt: skip
            fits = ran == total
        then = end_SN.max() if fits else np.inf
        if then <= now or (heat > 0 and np.random.random() < np.exp((now - then) / heat)):
            now = then
            if now < best - 1e-12:
                best = now
                best_kind[:], best_virtual[:] = kind_SN, virtual_SN
                if best <= target_s:
                    break
        else:
            kind_SN[s], virtual_SN[s] = old_kind, old_virtual
            number_units(kind_SN[s], virtual_SN[s], n, slices, virtuals, limit_S[s], hold_f, hold_d, unit_SN[s])
    kind_SN[:], virtual_SN[:] = best_kind, best_virtual
    return best
