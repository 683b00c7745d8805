"""Pipeline schedules as data: for every stage the order of its blocks, and a validator that trusts nobody.

A block is the forward pass (F), the input gradient (D), the weight gradient (W) or both gradients (B) of one
microbatch, or one sequence slice of it, on one model chunk. Virtual stages are the chunks in the order in which data
passes them; which device holds a virtual stage is what tells a loop from a V from a wave.

With n > 1 slices a microbatch is cut along the sequence: forward slices go in order, since attention looks back; input
gradients in reverse order, since gradients of keys and values come from later slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from common.config import ConfigError

F, D, W, B = 0, 1, 2, 3
KINDS = "FDWB"
Block = tuple[int, int, int, int]
"""(kind, microbatch, chunk of the device, slice)."""


@dataclass(frozen=True)
class Schedule:
    """Orders of blocks; arrays [stage, place in the stage's order], padded with kind -1."""

    name: str
    kind_SN: npt.NDArray[np.int8]
    microbatch_SN: npt.NDArray[np.int32]
    chunk_SN: npt.NDArray[np.int16]
    slice_SN: npt.NDArray[np.int16]
    device_of_virtual_V: npt.NDArray[np.int32]

    @classmethod
    def from_orders(cls, name: str, orders: Sequence[Sequence[Block]], device_of_virtual_V: Sequence[int]) -> Schedule:
        """From one list of blocks per stage."""
        width = max(len(order) for order in orders)
        table = np.zeros((len(orders), width, 4), np.int32)
        table[:, :, 0] = -1
        for stage, order in enumerate(orders):
            table[stage, : len(order)] = order
        return cls.from_table(name, table, device_of_virtual_V)

    @classmethod
    def from_table(cls, name: str, table_SN4: npt.NDArray[np.int32], device_of_virtual_V: Sequence[int]) -> Schedule:
        """From an array [stage, place, (kind, microbatch, chunk, slice)]."""
        return cls(
            name,
            table_SN4[:, :, 0].astype(np.int8),
            table_SN4[:, :, 1].astype(np.int32),
            table_SN4[:, :, 2].astype(np.int16),
            table_SN4[:, :, 3].astype(np.int16),
            np.asarray(device_of_virtual_V, np.int32),
        )

    @property
    def stages(self) -> int:
        """Devices of the pipeline."""
        return len(self.kind_SN)

    @property
    def virtuals(self) -> int:
        """Virtual stages: chunks of all devices."""
        return len(self.device_of_virtual_V)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return int(self.microbatch_SN[self.kind_SN >= 0].max()) + 1

    @cached_property
    def slices(self) -> int:
        """Sequence slices of a microbatch."""
        return int(self.slice_SN[self.kind_SN >= 0].max()) + 1

    @cached_property
    def virtual_SN(self) -> npt.NDArray[np.int32]:
        """Virtual stage of every block; -1 where there is none."""
        table = virtual_of_chunk(self.device_of_virtual_V, self.stages)
        virtual = table[np.arange(self.stages)[:, None], np.maximum(self.chunk_SN, 0)]
        return np.where(self.kind_SN >= 0, virtual, -1).astype(np.int32)

    def orders(self) -> list[list[Block]]:
        """One list of blocks per stage."""
        columns = (self.kind_SN, self.microbatch_SN, self.chunk_SN, self.slice_SN)
        return [
            [(int(k), int(m), int(c), int(n)) for k, m, c, n in zip(*rows, strict=True) if k >= 0]
            for rows in zip(*columns, strict=True)
        ]


def virtual_of_chunk(device_of_virtual_V: npt.NDArray[np.int32], stages: int) -> npt.NDArray[np.int32]:
    """[stage, chunk] → virtual stage; a device's chunks count in pipeline order; -1 where a device has fewer."""
    mine = [np.nonzero(device_of_virtual_V == stage)[0] for stage in range(stages)]
    table = np.full((stages, max(map(len, mine))), -1, np.int32)
    for stage, virtuals in enumerate(mine):
        table[stage, : len(virtuals)] = virtuals
    return table


def loop_devices(stages: int, chunks: int) -> list[int]:
    """Chunks go round: device 0, 1, ..., 0, 1, ... (interleaved 1F1B)."""
    return [virtual % stages for virtual in range(stages * chunks)]


def wave_devices(stages: int, chunks: int) -> list[int]:
    """Chunks go to and fro: device 0, 1, ..., 1, 0, 0, 1, ... (V for 2 chunks, wave for more)."""
    there = list(range(stages))
    return [device for chunk in range(chunks) for device in (there if chunk % 2 == 0 else there[::-1])]


def local_v_devices(stages: int, sites: int) -> list[int]:
    """A V inside each of `sites` equal groups of devices: data crosses between groups once each way."""
    each = stages // sites
    groups = (range(site * each, (site + 1) * each) for site in range(sites))
    return [device for group in groups for device in (*group, *reversed(group))]


def validate(schedule: Schedule, memory_limit: float | None = None) -> None:
    """Raise ConfigError unless the schedule can run, does all work once, and keeps within its memory.

    Checks: every (virtual stage, microbatch, slice) has F once, and D and W once or B once, on the device that holds
    it; no circular wait; on no stage more than `memory_limit` microbatches of activations (a slice of a chunk counts
    its share of a stage), held from the start of F to the end of W or B.
    """
    orders = schedule.orders()
    _check_complete(schedule, orders)
    _check_runnable(schedule, orders)
    if memory_limit is not None:
        held = peak_memory(schedule)
        worst = int(np.argmax(held))
        if held[worst] > memory_limit + 1e-9:
            raise ConfigError(
                f"schedule {schedule.name!r}: stage {worst} holds {held[worst]:.3g} microbatches of activations; the "
                f"limit is {memory_limit:.3g}"
            )


def _check_complete(schedule: Schedule, orders: list[list[Block]]) -> None:
    seen: dict[tuple[int, int, int, int], int] = {}
    for stage, order in enumerate(orders):
        for place, (kind, microbatch, _, cut) in enumerate(order):
            virtual = int(schedule.virtual_SN[stage, place])
            if virtual < 0 or not 0 <= kind <= B:
                raise ConfigError(f"schedule {schedule.name!r}: stage {stage}, place {place}: no such chunk or kind")
            for part in (D, W) if kind == B else (kind,):
                key = (part, virtual, microbatch, cut)
                seen[key] = seen.get(key, 0) + 1
    for part in (F, D, W):
        for virtual in range(schedule.virtuals):
            for microbatch in range(schedule.microbatches):
                for cut in range(schedule.slices):
                    count = seen.get((part, virtual, microbatch, cut), 0)
                    if count != 1:
                        raise ConfigError(
                            f"schedule {schedule.name!r}: {KINDS[part]} of microbatch {microbatch}, slice {cut} on "
                            f"virtual stage {virtual} is there {count} times"
                        )


def _needs(kind: int, virtual: int, microbatch: int, cut: int, schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """What must have ended before a block: (part, virtual stage, microbatch, slice), parts F, D, W."""
    last, slices = schedule.virtuals - 1, schedule.slices
    if kind == F:
        needs = [(F, virtual - 1, microbatch, cut)] if virtual else []
        return [*needs, (F, virtual, microbatch, cut - 1)] if cut else needs
    if kind == W:
        return [(D, virtual, microbatch, cut)]
    needs = [(F, virtual, microbatch, cut)]
    if virtual < last:
        needs.append((D, virtual + 1, microbatch, cut))
    if cut < slices - 1:
        needs.append((D, virtual, microbatch, cut + 1))
    return needs


def _check_runnable(schedule: Schedule, orders: list[list[Block]]) -> None:
    done: set[tuple[int, int, int, int]] = set()
    places = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                kind, microbatch, _, cut = order[places[stage]]
                virtual = int(schedule.virtual_SN[stage, places[stage]])
                if not all(need in done for need in _needs(kind, virtual, microbatch, cut, schedule)):
                    break
                done.update((part, virtual, microbatch, cut) for part in ((D, W) if kind == B else (kind,)))
                places[stage] += 1
                moved = True
    for stage, order in enumerate(orders):
        if places[stage] < len(order):
            kind, microbatch, chunk, cut = order[places[stage]]
            raise ConfigError(
                f"schedule {schedule.name!r}: stage {stage} waits for ever at place {places[stage]}: {KINDS[kind]} of "
                f"microbatch {microbatch}, chunk {chunk}, slice {cut}"
            )


def peak_memory(schedule: Schedule) -> npt.NDArray[np.float64]:
    """Most microbatches of activations that each stage holds at a time, a slice of a chunk counted as its share."""
    chunks = np.bincount(schedule.device_of_virtual_V, minlength=schedule.stages)
    change = np.where(schedule.kind_SN == F, 1.0, 0.0) - np.where(schedule.kind_SN >= W, 1.0, 0.0)
    held = np.cumsum(change, axis=1)
    # the place of an F already holds; what a W frees counts from the next place on
    return np.asarray(held.max(axis=1) / chunks / schedule.slices)


def check_timeline(
    schedule: Schedule, start_SN: npt.NDArray[np.float64], duration_SN: npt.NDArray[np.float64], delay_s: float = 0.0
) -> None:
    """Independent check of start times: blocks of a stage do not overlap and wait for what they need.

    `delay_s` is the least time of a message between virtual stages on different devices (0 allows all). Plain Python
    over the dependency rules, sharing no code with the kernels.
    """
    end: dict[tuple[int, int, int, int], tuple[float, int]] = {}
    real = schedule.kind_SN >= 0
    for stage, place in np.argwhere(real):
        tables = (schedule.kind_SN, schedule.virtual_SN, schedule.microbatch_SN, schedule.slice_SN)
        kind, *key = (int(table[stage, place]) for table in tables)
        for part in (D, W) if kind == B else (kind,):
            end[part, key[0], key[1], key[2]] = (float(start_SN[stage, place] + duration_SN[stage, place]), int(stage))
    for stage in range(schedule.stages):
        free = 0.0
        for place in np.nonzero(real[stage])[0]:
            begin = float(start_SN[stage, place])
            kind, microbatch, cut = (
                int(table[stage, place]) for table in (schedule.kind_SN, schedule.microbatch_SN, schedule.slice_SN)
            )
            virtual = int(schedule.virtual_SN[stage, place])
            if begin < free - 1e-9:
                raise ConfigError(f"stage {stage}: the block at place {place} starts before the one before it ends")
            for need in _needs(kind, virtual, microbatch, cut, schedule):
                ended, where = end[need]
                if begin < ended + (delay_s if where != stage else 0.0) - 1e-9:
                    raise ConfigError(f"stage {stage}: the block at place {place} starts before {need} arrives")
            free = begin + float(duration_SN[stage, place])
