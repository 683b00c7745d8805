"""Published ways to lay a job over sites, as parts of the Explorer's space; each is tuned over what it leaves open.

A baseline is a set of rules that a plan must keep, over all three dimensions; it may leave sites out as the Explorer
may. Its plan is the fastest that keeps them, by the same search and simulation, so the Explorer is never worse.
Atlas's turns on the link are not simulated here: its pipelines send together. DiLoCo changes the algorithm and is not
among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scale_across.collectives import HIERARCHICAL, RING
from scale_across.crossing import PRODUCTION, TECHNOLOGIES
from scale_across.families import FAMILIES
from scale_across.parallelism import FIELDS
from scale_across.space import Region, Rows

Mask = npt.NDArray[np.bool_]
EVERY = tuple(family.name for family in FAMILIES)
STATIC = ("1f1b",)
ANY = 2**31


@dataclass(frozen=True)
class Rules:
    """What a plan must keep to."""

    name: str
    source: str
    crossings: tuple[str, ...] = ("dp", "pp", "none")
    equal_shares: bool = False
    """Every replica computes the same number of microbatches."""
    max_chunks: int = ANY
    max_cp: int | None = None
    max_zero: int = 3
    reductions: tuple[int, ...] = (RING, HIERARCHICAL)
    dp_in_region: bool = False
    """Data parallelism crosses sites only inside one region."""
    schedules: tuple[str, ...] = EVERY
    technologies: tuple[str, ...] = tuple(TECHNOLOGIES)

    def takes(self, region: Region) -> bool:
        """Whether plans over these sites with this axis crossing may belong to it."""
        if region.crossing not in self.crossings:
            return False
        areas = {site.region or site.name for site in region.topology.spec.sites}
        return not (self.dp_in_region and region.crossing == "dp" and len(areas) > 1)

    def keeps(self, rows: Rows, global_batch: int) -> Mask:
        """Which rows may lead to plans that keep the rules; what a relaxed row leaves open counts as kept."""
        plans_NF = rows.plans_NF
        kept_N = plans_NF[:, FIELDS.index("chunks")] <= self.max_chunks
        if self.max_cp is not None:
            kept_N &= plans_NF[:, FIELDS.index("cp")] <= self.max_cp
        if self.equal_shares:
            kept_N &= (rows.batch_NK == global_batch).all(axis=1)
        if len(rows) and rows.family_N[0] >= -1:
            kept_N &= plans_NF[:, FIELDS.index("zero")] <= self.max_zero
            kept_N &= np.isin(plans_NF[:, FIELDS.index("reduction")], self.reductions)
        if len(rows) and rows.family_N[0] >= 0:
            kept_N &= np.isin(rows.family_N, [EVERY.index(name) for name in self.schedules])
        return np.asarray(kept_N)


EXPLORER = Rules("explorer", "the whole space")
BASELINES: tuple[Rules, ...] = (
    Rules(
        "production", "Meta: axis order TP, CP, PP, DP; interleaved 1F1B, ECMP with 16 flows per pair, flat rings",
        ("dp", "none"), equal_shares=True, reductions=(RING,), schedules=STATIC, technologies=(PRODUCTION,),
    ),
    Rules(
        "hierarchical", "NeMo: as production, reduced in the site, then across",
        ("dp", "none"), equal_shares=True, reductions=(HIERARCHICAL,), schedules=STATIC, technologies=(PRODUCTION,),
    ),
    Rules(
        "atlas", "arXiv 2411.14458: PP across sites, DP inside",
        ("pp", "none"), equal_shares=True, max_chunks=1, schedules=STATIC, technologies=(PRODUCTION,),
    ),
    Rules(
        "sailor", "SOSP'25: TP in a node, DP in a region, PP may cross",
        max_chunks=1, max_cp=1, max_zero=1, dp_in_region=True, schedules=STATIC, technologies=(PRODUCTION,),
    ),
    Rules(
        "crosspipe", "arXiv 2507.00217: PP across sites, schedules made for the links",
        ("pp", "none"), equal_shares=True, schedules=("1f1b", "zb_h1", "zb_h2", "zb_v", "cross", "cross_wave"),
        technologies=(PRODUCTION,),
    ),
)  # fmt: skip

DIMENSIONS = ("placement", "schedule", "network")


def freed(rules: Rules, *dimensions: str) -> Rules:
    """The rules with some of DIMENSIONS left to the search.

    Placement: sites, the axis that crosses them, degrees, sharding. Schedule: the order of blocks and the number of
    chunks. Network: the reduction across tiers and the technology of the links.
    """
    changes: dict[str, object] = {"name": f"{rules.name} + {' + '.join(dimensions)}" if dimensions else rules.name}
    if "placement" in dimensions:
        changes |= {
            "crossings": EXPLORER.crossings, "equal_shares": False, "max_cp": None, "max_zero": 3,
            "dp_in_region": False,
        }  # fmt: skip
    if "schedule" in dimensions:
        changes |= {"schedules": EVERY, "max_chunks": ANY}
    if "network" in dimensions:
        changes |= {"reductions": (RING, HIERARCHICAL), "technologies": tuple(TECHNOLOGIES)}
    return replace(rules, **changes)  # type: ignore[arg-type]
