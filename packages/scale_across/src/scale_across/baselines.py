"""Published ways to lay a job over sites, as parts of the Explorer's space; each is tuned over what it leaves open.

A baseline is a set of rules that a plan must keep. Its plan is the fastest that keeps them, by the same search and the
same estimate, so the Explorer is never worse. What these methods do beyond placement (Atlas's turns on the link,
CrossPipe's solver schedules) is not priced by the closed form: every one runs (interleaved) 1F1B here. DiLoCo changes
the algorithm and is not among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scale_across.collectives import HIERARCHICAL, RING
from scale_across.parallelism import FIELDS
from scale_across.space import MAX_CHUNKS, Ints, Region

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rules:
    """What a plan must keep to."""

    name: str
    source: str
    crossings: tuple[str, ...] = ("dp", "pp", "none")
    all_sites: bool = False
    equal_shares: bool = False
    """Every replica computes the same number of microbatches."""
    max_chunks: int = MAX_CHUNKS
    max_cp: int | None = None
    max_zero: int = 3
    reductions: tuple[int, ...] = (RING, HIERARCHICAL)
    dp_in_region: bool = False
    """Data parallelism crosses sites only inside one region."""

    def takes(self, region: Region) -> bool:
        """Whether plans over these sites with this axis crossing may belong to it."""
        if region.crossing not in self.crossings or (self.all_sites and region.left_out):
            return False
        areas = {site.region or site.name for site in region.topology.spec.sites}
        return not (self.dp_in_region and region.crossing == "dp" and len(areas) > 1)

    def keeps(self, plans_NF: Ints, batch_N: npt.NDArray[np.float64], global_batch: int) -> Mask:
        """Which plans keep the rules that do not depend on the sites."""
        kept_N = plans_NF[:, FIELDS.index("chunks")] <= self.max_chunks
        kept_N &= plans_NF[:, FIELDS.index("zero")] <= self.max_zero
        kept_N &= np.isin(plans_NF[:, FIELDS.index("reduction")], self.reductions)
        if self.max_cp is not None:
            kept_N &= plans_NF[:, FIELDS.index("cp")] <= self.max_cp
        if self.equal_shares:
            kept_N &= batch_N == global_batch
        return np.asarray(kept_N)


EXPLORER = Rules("explorer", "the whole space")
BASELINES = (
    Rules("production", "axis order TP, CP, PP, DP; flat rings", ("dp", "none"), True, True, reductions=(RING,)),
    Rules(
        "hierarchical", "NeMo: reduced in the site, then across", ("dp", "none"), True, True, reductions=(HIERARCHICAL,)
    ),
    Rules("atlas", "arXiv 2411.14458: PP across sites, DP inside", ("pp", "none"), True, True, max_chunks=1),
    Rules("sailor", "SOSP'25: DP in a region, PP may cross", max_chunks=1, max_cp=1, max_zero=1, dp_in_region=True),
    Rules("crosspipe", "arXiv 2507.00217: PP across sites", ("pp", "none"), True, True),
)
