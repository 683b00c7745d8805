"""How short a schedule of a family can be at best: busy stage, busy link, rounds of memory.

The bounds hold in the model of `pipeline` for every order of blocks, whatever a greedy or a solver finds. Block times
are those of the slices (price included): a unit is one slice of one microbatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scale_across.schedule import local_v_devices, wave_devices
from scale_across.schedules_cross import SLICE_PRICE, Setting


def unidirectional_bound_s(setting: Setting, slices: int = 1) -> float:
    """No schedule in which data passes every stage once is shorter.

    At stage s let f_q be the earliest start of the q-th forward unit and a_i the earliest arrival of what the i-th
    input gradient needs (gradients go through a microbatch's slices in reverse). With c the units that memory lets be
    in flight, R the way from the end of a microbatch's last forward unit here to the last stage and back, `link` the
    longer of a message on the link and a block of the next stage:

        a_i >= f_q + F + R  for the first gradient i of the microbatch whose last forward unit is q
        a_i >= a_(i-1) + link
        f_q >= f_(q-1) + F
        f_q >= a_i + (q - c - i + 1)(D + W) + (q - i - c) F   for i <= q - c: the work here between the two

    The step ends no earlier than a_i + what this stage must still do then. And before the last input gradient of a
    stage all but c weight gradients are done, while after it the gradient must travel to stage 0:

        T >= first + M (F + D) + (M - c) W + s D + hops + W

    With checkpoints (recompute) only units between D and W hold memory: c binds the last line only.
    """
    p, total = setting.stages, setting.microbatches * slices
    scale = (1 + SLICE_PRICE[slices]) / slices
    f, d, w = setting.f_s * scale, setting.d_s * scale, setting.w_s * scale
    occupied = setting.occupied_s / slices
    hop = occupied + setting.latency_s
    each, pending = p // setting.sites, setting.memory * slices
    limit = pending if setting.checkpoint == 1.0 else total
    best = 0.0
    for s in range(p):
        before, after = s // each, setting.sites - 1 - s // each
        link = max(d, occupied if after else 0.0) if s < p - 1 else d
        way = (p - 1 - s) * (f + d) + 2 * after * hop
        first = s * f + before * hop
        spacing = max(f, occupied if before else 0.0)
        starts, arrivals = np.zeros(total), np.zeros(total)
        for unit in range(total):
            start = first if unit == 0 else starts[unit - 1] + spacing
            earlier = np.arange(unit - limit + 1)
            if len(earlier):
                work = (unit - limit - earlier + 1) * (d + w) + (unit - earlier - limit) * f
                start = max(start, float((arrivals[: len(earlier)] + work).max()))
            starts[unit] = start
            if (unit + 1) % slices == 0:  # the microbatch is through: its gradients can return
                for back in range(unit + 1 - slices, unit + 1):
                    reached = start + f + way if back == unit + 1 - slices else 0.0
                    arrivals[back] = max(reached, arrivals[back - 1] + link if back else 0.0)
        index = np.arange(total)
        left = np.maximum(0, total - index - limit) * f + (total - index) * (d + w)
        tail = s * d + before * hop + w
        best = max(
            best,
            float((arrivals + left).max()),
            float(arrivals[-1]) + d + tail,
            first + total * (f + d + w),
            first + total * (f + d) + max(0, total - pending) * w + tail,
        )
    return best


def folded_bound_s(setting: Setting, devices: Sequence[int], slices: int = 1) -> float:
    """No schedule on these devices of virtual stages (a V, a wave) is shorter.

    For each device: its work after the first unit can reach it; the same with all but c weight gradients before its
    last input gradient, which then travels to virtual stage 0; and before the first gradient can be back at the device
    that starts, it can do no more forward work than memory holds. For each direction of each link: the messages that
    it carries, between the first that can reach it and what must follow the last.
    """
    chunks = len(devices) // setting.stages
    total = setting.microbatches * slices
    scale = (1 + SLICE_PRICE[slices]) / slices / chunks
    f, d, w = setting.f_s * scale, setting.d_s * scale, setting.w_s * scale
    occupied = setting.occupied_s / slices
    hop = occupied + setting.latency_s
    each = setting.stages // setting.sites
    site = np.array([device // each for device in devices])
    crossing = np.concatenate([[0], np.cumsum(site[1:] != site[:-1])])  # hops before virtual stage v
    pending = setting.memory * slices * chunks
    best = 0.0
    for device in set(devices):
        mine = [v for v, where in enumerate(devices) if where == device]
        first = mine[0] * f + crossing[mine[0]] * hop
        tail = mine[0] * d + crossing[mine[0]] * hop + w
        blocks = total * len(mine)
        best = max(
            best,
            first + blocks * (f + d + w),
            first + blocks * (f + d) + max(0, blocks - pending) * w + tail,
        )
        if setting.checkpoint == 1.0:
            last = mine[-1]
            turn = (slices + len(devices) - 1) * f + crossing[-1] * hop
            turn += (len(devices) - 1 - last) * d + (crossing[-1] - crossing[last]) * hop
            idle = max(0.0, turn - first - min(pending, blocks) * f)
            best = max(best, first + idle + blocks * (f + d + w))
    for link in {(int(a), int(b)) for a, b in itertools.pairwise(site) if a != b}:
        best = max(best, _link_bound_s(site, link, total, f, d, w, occupied, setting.latency_s, crossing))
    return float(best)


def _link_bound_s(
    site: npt.NDArray[np.int64],
    link: tuple[int, int],
    units: int,
    f: float,
    d: float,
    w: float,
    occupied: float,
    latency: float,
    crossing: npt.NDArray[np.int64],
) -> float:
    """One direction of one link: forward messages from v to v + 1 and gradient messages from v + 1 to v share it."""
    last = len(site) - 1
    hop = occupied + latency
    forward = [v for v in range(last) if (site[v], site[v + 1]) == link]
    gradient = [v for v in range(last) if (site[v + 1], site[v]) == link]
    through = (last + 1) * f + crossing[-1] * hop
    begun, follows = [], []
    for v in forward:
        begun.append((v + 1) * f + crossing[v] * hop)
        rest = (last - v) * f + (crossing[-1] - crossing[v + 1]) * hop
        follows.append(latency + rest + (last + 1) * d + crossing[-1] * hop + w)
    for v in gradient:
        begun.append(through + (last - v) * d + (crossing[-1] - crossing[v + 1]) * hop)
        follows.append(latency + (v + 1) * d + crossing[v] * hop + w)
    return float(min(begun) + (len(forward) + len(gradient)) * units * occupied + min(follows))


def family_bounds_s(setting: Setting, slices: int = 1) -> dict[str, float]:
    """Bound of each family that `ours` searches."""
    return {
        "ud": unidirectional_bound_s(setting, slices),
        "wave": folded_bound_s(setting, wave_devices(setting.stages, 2), slices),
        "local_v": folded_bound_s(setting, local_v_devices(setting.stages, setting.sites), slices),
    }
