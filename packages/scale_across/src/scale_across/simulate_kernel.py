"""The compiled event loop of one training step: blocks on stages, messages and collectives on resources.

A resource is a stream or a link in one direction: it carries one transfer at a time, in the order in which they became
ready. Blocks of a stage run in the order of the schedule. Two ways through, same result where both apply:

- `run_fixed`: no collectives and no resource with two senders, so any order of evaluation gives the same times.
- `run_events`: events in order of time (binary heap), for links that several stages and collectives share.

Times are seconds from the start of the step. All arrays by flattened block index B (stages one after another), by
stage S, by resource R, by route P (source and target stage), by collective J or by phase of a collective H.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

UNKNOWN = -1.0
_KIND = 1 << 32
_BLOCK_END, _READY, _DONE, _LEG_END = 0, 1, 2, 3


@njit(cache=True, nogil=True)
def run_fixed(
    first_S: Ints,
    duration_B: Floats,
    depends_B: Ints,
    route_B: Ints,
    resource_P: Ints,
    occupied_s_P: Floats,
    latency_s_P: Floats,
    exposed: float,
    free_R: Floats,
    start_B: Floats,
    sent_B: Floats,
    arrive_B: Floats,
) -> int:
    """Fill start_B, sent_B (start of the block's message) and arrive_B; returns the number of blocks that ran.

    arrive_B starts as UNKNOWN, free_R as 0. `exposed` is the share of a message that its sender's compute stream waits
    for.
    """
    stages = len(first_S) - 1
    next_S = first_S[:-1].copy()
    free_S = np.zeros(stages)
    waits_for_S = np.full(stages, -1, np.int32)
    stack = np.empty(stages, np.int32)
    for s in range(stages):
        stack[s] = stages - 1 - s
    height, ran = stages, 0
    while height > 0:
        height -= 1
        s = stack[height]
        i = next_S[s]
        begun = i
        now = free_S[s]
        last = first_S[s + 1]
        while i < last:
            d = depends_B[i]
            if d >= 0:
                arrival = arrive_B[d]
                if arrival < 0.0:
                    waits_for_S[s] = d
                    break
                now = max(now, arrival)
            start_B[i] = now
            now += duration_B[i]
            route = route_B[i]
            if route >= 0:
                r = resource_P[route]
                begin = max(now, free_R[r])
                occupied_s = occupied_s_P[route]
                free_R[r] = begin + occupied_s
                sent_B[i] = begin
                arrive_B[i] = begin + occupied_s + latency_s_P[route]
                now += exposed * occupied_s
                target = route % stages
                if waits_for_S[target] == i:
                    waits_for_S[target] = -1
                    stack[height] = target
                    height += 1
            i += 1
        ran += i - begun
        next_S[s] = i
        free_S[s] = now
    return ran


@njit(cache=True, nogil=True)
def _push(time_Q: Floats, code_Q: npt.NDArray[np.int64], size: int, time: float, code: int) -> int:
    """Sift up; equal times by code, so that runs are reproducible."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if time_Q[parent] < time or (time_Q[parent] == time and code_Q[parent] <= code):
            break
        time_Q[at] = time_Q[parent]
        code_Q[at] = code_Q[parent]
        at = parent
    time_Q[at] = time
    code_Q[at] = code
    return size + 1


@njit(cache=True, nogil=True)
def _pop(time_Q: Floats, code_Q: npt.NDArray[np.int64], size: int) -> int:
    """Remove the root (read it first): the last entry sifts down."""
    size -= 1
    time, code = time_Q[size], code_Q[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            time_Q[right] < time_Q[child] or (time_Q[right] == time_Q[child] and code_Q[right] < code_Q[child])
        ):
            child = right
        if time < time_Q[child] or (time == time_Q[child] and code <= code_Q[child]):
            break
        time_Q[at] = time_Q[child]
        code_Q[at] = code_Q[child]
        at = child
    time_Q[at] = time
    code_Q[at] = code
    return size


@njit(cache=True, nogil=True)
def _send(
    ready: float, occupied_s: float, r: int, free_R: Floats, active_R: npt.NDArray[np.bool_], owed_R: Floats
) -> float:
    """Put a message on resource r, before a collective under way; returns when it starts."""
    begin = max(ready, free_R[r])
    free_R[r] = begin + occupied_s
    if active_R[r]:
        owed_R[r] += occupied_s
    return begin


@njit(cache=True, nogil=True)
def run_events(  # noqa: C901 -- one loop: the state is some twenty arrays, and every branch changes several
    first_S: Ints,
    duration_B: Floats,
    depends_B: Ints,
    route_B: Ints,
    resource_P: Ints,
    occupied_s_P: Floats,
    latency_s_P: Floats,
    exposed: float,
    free_R: Floats,
    start_B: Floats,
    sent_B: Floats,
    arrive_B: Floats,
    waiter_B: Ints,
    special_B: Ints,
    gate_X: Ints,
    trigger_X: Ints,
    item_T: Ints,
    share_T: Floats,
    phase_J: Ints,
    resource_H: Ints,
    occupied_s_H: Floats,
    latency_s_H: Floats,
    begin_H: Floats,
    end_H: Floats,
    done_J: Floats,
    priority: bool,
    early_receive: bool,
) -> int:
    """As `run_fixed`, with collectives. Returns the number of blocks that ran.

    special_B: -1, or the row X of a block that waits for a collective (gate_X: which, -1 none) or releases some:
    items item_T[trigger_X[x]:trigger_X[x + 1]], each when the share share_T of the block has run. A collective J is the
    chain of phases phase_J[j]:phase_J[j + 1]; those that no block releases have done_J = 0 on entry (others UNKNOWN)
    and are ready at time 0. With `priority`, messages of blocks interrupt collectives on the same resource (packets
    of two classes; the collective goes on after them), else all transfers go in order of readiness. Without
    `early_receive` a message waits until its receiver has nothing else to do.
    """
    stages, items = len(first_S) - 1, len(phase_J) - 1
    next_S = first_S[:-1].copy()
    free_S = np.zeros(stages)
    ended_B = np.full(len(duration_B) if not early_receive else 0, UNKNOWN)
    at_J = phase_J.copy()
    gate_waiter_J = np.full(items, -1, np.int32)
    head_R = np.full(len(free_R), -1, np.int32)
    tail_R = np.full(len(free_R), -1, np.int32)
    behind_J = np.full(items, -1, np.int32)
    active_R = np.full(len(free_R), False)
    owed_R = np.zeros(len(free_R))  # time that messages took from the collective under way
    time_Q = np.empty(stages + 2 * items + len(free_R) + 8)
    code_Q = np.empty(len(time_Q), np.int64)
    size, ran = 0, 0
    for j in range(items):
        if done_J[j] == 0.0:
            done_J[j] = UNKNOWN
            size = _push(time_Q, code_Q, size, 0.0, _READY * _KIND + j)
    wake = np.empty(stages + 1, np.int32)
    awake = 0
    for s in range(stages):
        wake[stages - 1 - s] = s
    awake = stages
    while True:
        while awake > 0:  # start the next block of these stages, or note what it waits for
            awake -= 1
            s = wake[awake]
            i = next_S[s]
            if i >= first_S[s + 1]:
                continue
            begin = free_S[s]
            d = depends_B[i]
            if d >= 0:
                if arrive_B[d] < 0.0:
                    if early_receive or ended_B[d] < 0.0:
                        waiter_B[d] = s
                        continue
                    size_s = occupied_s_P[route_B[d]]
                    r = resource_P[route_B[d]]
                    sent_B[d] = _send(max(free_S[s], ended_B[d]), size_s, r, free_R, active_R, owed_R)
                    arrive_B[d] = sent_B[d] + size_s + latency_s_P[route_B[d]]
                begin = max(begin, arrive_B[d])
            x = special_B[i]
            if x >= 0:
                g = gate_X[x]
                if g >= 0:
                    if done_J[g] < 0.0:
                        gate_waiter_J[g] = s
                        continue
                    begin = max(begin, done_J[g])
                for k in range(trigger_X[x], trigger_X[x + 1]):
                    ready = begin + share_T[k] * duration_B[i]
                    size = _push(time_Q, code_Q, size, ready, _READY * _KIND + item_T[k])
            start_B[i] = begin
            next_S[s] = i + 1
            ran += 1
            size = _push(time_Q, code_Q, size, begin + duration_B[i], _BLOCK_END * _KIND + s)
        if size == 0:
            return ran
        now, code = time_Q[0], code_Q[0]
        size = _pop(time_Q, code_Q, size)
        kind, j = code // _KIND, code % _KIND
        if kind == _BLOCK_END:
            s = j
            i = next_S[s] - 1
            free_S[s] = now
            wake[awake] = s
            awake += 1
            route = route_B[i]
            if route >= 0:
                free_S[s] = now + exposed * occupied_s_P[route]
                w = waiter_B[i]
                if early_receive or w >= 0:
                    sent_B[i] = _send(now, occupied_s_P[route], resource_P[route], free_R, active_R, owed_R)
                    arrive_B[i] = sent_B[i] + occupied_s_P[route] + latency_s_P[route]
                if not early_receive:
                    ended_B[i] = now
                if w >= 0:
                    wake[awake] = w
                    awake += 1
        elif kind == _DONE:
            done_J[j] = now
            if gate_waiter_J[j] >= 0:
                wake[awake] = gate_waiter_J[j]
                awake += 1
        elif kind == _LEG_END:
            h = at_J[j]
            r = resource_H[h]
            if owed_R[r] > 0.0:
                size = _push(time_Q, code_Q, size, now + owed_R[r], code)
                owed_R[r] = 0.0
                continue
            end_H[h] = now
            at_J[j] = h + 1
            following = _READY if h + 1 < phase_J[j + 1] else _DONE
            size = _push(time_Q, code_Q, size, now + latency_s_H[h], following * _KIND + j)
            active_R[r] = False
            j = head_R[r]
            if j >= 0:
                head_R[r] = behind_J[j]
        else:
            r = resource_H[at_J[j]]
            if active_R[r]:  # wait behind the collectives that do
                if head_R[r] < 0:
                    head_R[r] = j
                else:
                    behind_J[tail_R[r]] = j
                tail_R[r] = j
                behind_J[j] = -1
                continue
        if kind == _READY or (kind == _LEG_END and j >= 0):  # this collective takes the resource
            h = at_J[j]
            begin_H[h] = max(now, free_R[r])
            ends = begin_H[h] + occupied_s_H[h]
            if priority:
                active_R[r] = True
            else:
                free_R[r] = ends
            size = _push(time_Q, code_Q, size, ends, _LEG_END * _KIND + j)
