"""Groups of actors at reserved sites, called together, in rank order; a dead worker is an error, never a hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.placement import Reservation

WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


DEATH_SHOWS_S = 5.0
"""How long after one worker's error Ray may take to notice that another one's process has ended."""


class WorkerDied(RuntimeError):
    """A worker process ended while the job needed it."""

    def __init__(self, role: str, rank: int, site: str, cause: str) -> None:
        super().__init__(f"{role} rank {rank} at site {site!r} died: {cause}")
        self.role, self.rank, self.site = role, rank, site


class WorkerGroup:
    """One actor per slot of a role.

    Args:
        worker: a plain class; it is made an actor here. Its constructor takes the keyword arguments below.
        reservation: where the workers run.
        role: which slots of the reservation.
        arguments: rank → keyword arguments of the constructor.
    """

    def __init__(
        self, worker: type, reservation: Reservation, role: str, arguments: Callable[[int], dict[str, Any]]
    ) -> None:
        self.role = role
        self.slots = reservation.slots[role]
        actor = ray.remote(worker)
        self.actors = [
            actor.options(
                num_cpus=1,
                resources={reservation.resource: 1},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    reservation.group, placement_group_bundle_index=slot.bundle
                ),
                runtime_env={"env_vars": WORKER_ENV},
                max_restarts=0,
            ).remote(**arguments(slot.rank))
            for slot in self.slots
        ]

    def __len__(self) -> int:
        return len(self.actors)

    def start_call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker with the same arguments; returns object references in rank order, at once."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def start_each(self, method: str, per_rank: Sequence[Any]) -> list[Any]:
        """Call `method` with one argument of its own per rank; returns object references in rank order, at once."""
        return [getattr(actor, method).remote(arg) for actor, arg in zip(self.actors, per_rank, strict=True)]

    def call(self, method: str, *args: Any, timeout_s: float = 600.0, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker and return the results in rank order; see `collect` for errors."""
        return collect({self: self.start_call(method, *args, **kwargs)}, timeout_s)[self]

    def call_each(self, method: str, per_rank: Sequence[Any], timeout_s: float = 600.0) -> list[Any]:
        """Call `method` with one argument per rank and return the results in rank order; see `collect` for errors."""
        return collect({self: self.start_each(method, per_rank)}, timeout_s)[self]

    def stop(self) -> None:
        """End the workers; what they were doing is lost."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def collect(calls: dict[WorkerGroup, list[Any]], timeout_s: float = 600.0) -> dict[WorkerGroup, list[Any]]:
    """Wait for calls to several groups at once.

    The calls are watched together, so a death in one group is seen while another group waits for the dead worker.

    Raises:
        WorkerDied: as soon as one worker is gone; the other calls are abandoned.
        TimeoutError: not all answered within `timeout_s`; the text names who is missing.
        The worker's own exception, when a method raised.
    """
    owners = {ref: (group, rank) for group, refs in calls.items() for rank, ref in enumerate(refs)}
    pending = list(owners)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            missing = ", ".join(f"{owners[ref][0].role} {owners[ref][1]}" for ref in pending)
            raise TimeoutError(f"no answer within {timeout_s:.0f} s from: {missing}")
        for ref in done:
            group, rank = owners[ref]
            try:
                ray.get(ref)
            except RayActorError as error:
                raise WorkerDied(group.role, rank, group.slots[rank].site, _first_line(error)) from None
            except RayTaskError as error:
                # a peer's death breaks the connections of the others, whose errors may come first
                raise _death(owners, pending) or error.as_instanceof_cause() from None
    return {group: ray.get(refs) for group, refs in calls.items()}


def _death(owners: dict[Any, tuple[WorkerGroup, int]], pending: list[Any]) -> WorkerDied | None:
    """The death of a worker that is still to answer, if one shows within some seconds."""
    done, _ = ray.wait(pending, num_returns=len(pending), timeout=DEATH_SHOWS_S) if pending else ([], [])
    for ref in done:
        group, rank = owners[ref]
        try:
            ray.get(ref)
        except RayActorError as error:
            return WorkerDied(group.role, rank, group.slots[rank].site, _first_line(error))
        except RayTaskError:
            continue
    return None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
