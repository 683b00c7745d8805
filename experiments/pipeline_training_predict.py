"""What the Explorer's event simulation says about a pipeline whose blocks and links have been profiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.config import ConfigError
from scale_across.overlap import OverlapPolicy
from scale_across.schedule import Schedule, validate
from scale_across.schedules_cross import Setting, ours
from scale_across.schedules_static import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from scale_across.simulate import Phase, Work, simulate

STATIC = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "interleaved": lambda stages, microbatches: interleaved(stages, microbatches, 2),
    "zb_v": zb_v,
}
OURS = "ours"
"""The best order found for the measured times and links, over all families without slices."""


@dataclass(frozen=True)
class Way:
    """Between two sites, or two ranks of a site, in one direction."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Profile:
    """What was measured on the real workers."""

    duration_KV: np.ndarray
    """Seconds of F, D, W, B per virtual stage."""
    update_s: float
    ways: Mapping[tuple[str, str], Way]
    """From site to site; the same site twice: inside it."""


@dataclass(frozen=True)
class Load:
    """What a placement asks of the links."""

    sites_RS: tuple[tuple[str, ...], ...]
    """Site of every stage of every replica."""
    boundary_bytes: int
    gradient_bytes_V: tuple[int, ...]
    """Of each virtual stage."""


def cross_setting(profile: Profile, load: Load, microbatches: int, memory: int) -> Setting:
    """The measured pipeline as `schedules_cross` describes it: equal sites in a chain, equal stages.

    Raises:
        ConfigError: the stages of a pipeline do not lie in equal groups, one site after the other.
    """
    sites = load.sites_RS[0]
    order = list(dict.fromkeys(sites))
    each = len(sites) // len(order)
    if list(sites) != [site for site in order for _ in range(each)] or len(order) < 2:
        raise ConfigError(f"{OURS}: stages at {', '.join(sites)} are no equal groups at two or more sites")
    f_s, d_s, w_s = profile.duration_KV[:3].sum(axis=1) / len(sites)
    way = profile.ways[order[0], order[1]]
    occupied_s = way.s_per_byte * load.boundary_bytes * len(load.sites_RS)
    return Setting(
        len(sites), len(order), microbatches, float(f_s), float(d_s), float(w_s), occupied_s, way.latency_s, memory
    )


def make_schedule(name: str, stages: int, microbatches: int, setting: Setting | None, proposals: int) -> Schedule:
    """A published order by name, or the best that we find for `setting`."""
    if name == OURS:
        if setting is None:
            raise ConfigError(f"{OURS}: needs a measured setting")
        found = ours(setting, proposals, slices=(1,))
        schedule = min(found.values(), key=lambda run: run.makespan_s).schedule
    elif name in STATIC:
        schedule = STATIC[name](stages, microbatches)
    else:
        raise ConfigError(f"schedules: unknown {name!r}; known: {', '.join([*STATIC, OURS])}")
    validate(schedule)
    return schedule


def predict_step_s(schedule: Schedule, profile: Profile, load: Load) -> float:
    """Seconds of a step by event simulation: one replica stands for all, reductions follow the last block."""
    sites, replicas, stages = load.sites_RS[0], len(load.sites_RS), len(load.sites_RS[0])
    names: list[str] = []
    shared: list[int] = []

    def resource(name: str, replicas_on_it: int) -> int:
        if name not in names:
            names.append(name)
            shared.append(replicas_on_it)
        return names.index(name)

    resource_SS = np.zeros((stages, stages), np.int32)
    occupied_s_SS, latency_s_SS = np.zeros((stages, stages)), np.zeros((stages, stages))
    for a in range(stages):
        for b in range(stages):
            crosses = sites[a] != sites[b]
            sharing = sum(row[a] == sites[a] and row[b] == sites[b] for row in load.sites_RS) if crosses else 1
            resource_SS[a, b] = resource(f"{sites[a]}>{sites[b]}" if crosses else f"{a}>{b}", sharing)
            way = profile.ways[sites[a], sites[b]]
            occupied_s_SS[a, b], latency_s_SS[a, b] = way.s_per_byte * load.boundary_bytes, way.latency_s
    reduce_S = _reductions(schedule, profile, load, resource) if replicas > 1 else ()
    work = Work(
        duration_KV=profile.duration_KV,
        resource_SS=resource_SS,
        occupied_s_SS=occupied_s_SS,
        latency_s_SS=latency_s_SS,
        resources=tuple(names),
        replicas_R=np.array(shared, np.int32),
        reduce_S=reduce_S,
        optimizer_s=profile.update_s,
    )
    return simulate(schedule, work, OverlapPolicy(reduce_overlap=False)).step_s


def _reductions(schedule: Schedule, profile: Profile, load: Load, resource: object) -> tuple[tuple[Phase, ...], ...]:
    """Legs of the ring over the replicas of every stage: 2 (n - 1) rounds, each as slow as its slowest message."""
    assert callable(resource)
    n, legs_S = len(load.sites_RS), []
    for stage, column in enumerate(zip(*load.sites_RS, strict=True)):
        chunks = [v for v, device in enumerate(schedule.device_of_virtual_V) if device == stage]
        nbytes = sum(load.gradient_bytes_V[v] for v in chunks) / len(chunks) / n
        hops = [(column[r], column[(r + 1) % n]) for r in range(n)]
        slowest = max(hops, key=lambda hop: profile.ways[hop].s_per_byte * hops.count(hop))
        way = profile.ways[slowest]
        crosses = slowest[0] != slowest[1]
        occupied_s = nbytes * way.s_per_byte * (hops.count(slowest) if crosses else 1)
        name = ">".join(slowest) if crosses else f"reduce {stage}"
        leg = Phase(resource(name, 1), occupied_s, way.latency_s)
        legs_S.append((leg,) * (2 * (n - 1)))
    return tuple(legs_S)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values, float)
        return np.array([(np.sum(array < v) + np.sum(array <= v) + 1) / 2 for v in array])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])
