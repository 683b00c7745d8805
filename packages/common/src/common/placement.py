"""A Placement becomes reserved GPUs at the right sites, or one error that says what is short where.

All roles of a job go into one Ray placement group: two jobs that start at once cannot each hold half of what the other
waits for. What cannot fit is refused before Ray is asked, since Ray says only that it does not fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from common.cluster import SITE_LABEL, gpu_resource
from common.config import ConfigError
from common.spec import Placement


class PlacementError(ConfigError):
    """The placement cannot be had on this cluster, now or at all; the text says what is short at which site."""


@dataclass(frozen=True)
class Slot:
    """One reserved GPU: where rank `rank` of its role runs."""

    rank: int
    site: str
    bundle: int
    """Index into the placement group's bundles."""


class Reservation:
    """GPUs held for one job; a context manager that gives them back. `slots[role]` is in rank order."""

    def __init__(self, group: Any, slots: dict[str, tuple[Slot, ...]], resource: str) -> None:
        self.group, self.slots, self.resource = group, slots, resource

    def release(self) -> None:
        """Give the GPUs back; actors that still run on them are ended by Ray. May be called twice."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def reserve(placement: Placement, *, timeout_s: float = 60.0) -> Reservation:
    """Reserve one GPU and one CPU per worker at the sites of `placement`, on the connected Ray cluster.

    Each bundle names its site by label, so a bundle's site is known by construction and rank r of a role is the r-th of
    that role's bundles; Ray may start the bundles in any order.

    Raises:
        PlacementError: a site is unknown or has too few GPUs (at once), or stays taken by others for `timeout_s`.
    """
    resource = gpu_resource()
    need = placement.gpus_by_site()
    have, free = gpus_by_site(resource)
    _refuse_impossible(need, have)
    order = [(role, rank, site) for role, sites in placement.roles.items() for rank, site in enumerate(sites)]
    group = placement_group(
        [{"CPU": 1, resource: 1} for _ in order],
        strategy="PACK",
        bundle_label_selector=[{SITE_LABEL: site} for _, _, site in order],
    )
    try:
        if not group.wait(timeout_s):
            state = placement_group_table(group)["stats"]["scheduling_state"]
            _, free = gpus_by_site(resource)
            taken = [f"site {site!r}: needs {n}, free {free.get(site, 0)} of {have[site]}" for site, n in need.items()]
            raise PlacementError(f"GPUs were not free within {timeout_s:.0f} s ({state}): " + "; ".join(taken))
    except BaseException:
        remove_placement_group(group)
        raise
    slots: dict[str, list[Slot]] = {role: [] for role in placement.roles}
    for bundle, (role, rank, site) in enumerate(order):
        slots[role].append(Slot(rank, site, bundle))
    return Reservation(group, {role: tuple(of_role) for role, of_role in slots.items()}, resource)


def gpus_by_site(resource: str) -> tuple[dict[str, int], dict[str, int]]:
    """GPUs (there, free now) per site over the live nodes."""
    have: Counter[str] = Counter()
    free: Counter[str] = Counter()
    available = ray._private.state.available_resources_per_node()
    for node in ray.nodes():
        site = node.get("Labels", {}).get(SITE_LABEL)
        if node["Alive"] and site:
            have[site] += int(node["Resources"].get(resource, 0))
            free[site] += int(available.get(node["NodeID"], {}).get(resource, 0))
    return dict(have), dict(free)


def _refuse_impossible(need: dict[str, int], have: dict[str, int]) -> None:
    faults = []
    for site, count in need.items():
        if site not in have:
            faults.append(
                f"site {site!r} is not in the running cluster (sites there: {', '.join(sorted(have)) or 'none'})"
            )
        elif count > have[site]:
            faults.append(f"site {site!r} has {have[site]} GPUs, the placement needs {count}")
    if faults:
        raise PlacementError(
            "; ".join(faults) + ": change the cluster or the job, or start the cluster it was made for"
        )
