"""The vocabulary that both systems share: sites, links between them, and where the workers of a job sit.

Plain data, validated. Units are in the names; all bandwidths are per direction and in 10^9 bits per second.
"""

from __future__ import annotations

from collections import Counter

from pydantic import Field, field_validator, model_validator

from common.config import Config


class TierSpec(Config):
    """One level of a site's network: domains of `gpus` accelerators, and how those meet that share a domain."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    gpus: int | None = Field(default=None, gt=0)
    """GPUs in one domain. Missing: the innermost tier takes the site's node, the outermost the whole site."""
    bandwidth_gbps: float | None = Field(default=None, gt=0)
    """Of one GPU's port, per direction. Missing: the accelerator's fabric (innermost tier) or network port."""
    oversubscription: float = Field(default=1.0, ge=1)
    """Ports below over capacity up into this tier: 2.8 means that all GPUs together get 1/2.8 of their ports."""
    latency_us: float | None = Field(default=None, ge=0)
    """One way, between two GPUs that meet at this tier. Missing: `latency_factor` times the accelerator's."""
    latency_factor: float = Field(default=1.0, gt=0)


class Site(Config):
    """One data-centre site: `gpus` accelerators of one kind in nodes of `gpus_per_node`.

    A hall with two kinds of accelerators is two sites with a fast link.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    gpus: int = Field(gt=0)
    accelerator: str = "h100-sxm"
    gpus_per_node: int = Field(default=8, gt=0)
    region: str = ""
    """Sites of one region are near each other; the hierarchical baseline groups by it."""
    network: str = ""
    """The tiers inside the site by name (`meta`, `llama3-pods`) or a YAML file; see docs/networks.md."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers inside the site, innermost first, instead of `network`. Neither: nodes in one flat network."""
    uplink_gbps: float | None = Field(default=None, gt=0)
    """What all links of the site carry together, per direction; missing: as much as they can."""

    @model_validator(mode="after")
    def _one_network(self) -> Site:
        if self.network and self.tiers:
            raise ValueError(f"site {self.name!r} has both network {self.network!r} and tiers; keep one of them")
        return self


class Link(Config):
    """A full-duplex connection between two sites, shared by all traffic between them."""

    between: tuple[str, str]
    bandwidth_gbps: float = Field(gt=0)
    """Capacity per direction, of the whole link."""
    latency_us: float = Field(ge=0)
    """One way."""
    paths: int = Field(default=1, gt=0)
    """Equal fibres or routes that it is made of; flows are hashed or sprayed over them. 1: no balancing to lose."""
    loss: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a packet is lost."""

    @field_validator("between")
    @classmethod
    def _two_sites(cls, value: tuple[str, str]) -> tuple[str, str]:
        if value[0] == value[1]:
            raise ValueError("a link joins two different sites")
        return value


class ClusterSpec(Config):
    """Sites and the links between them.

    Every pair of sites must be connected, directly or through other sites. Site and link names are checked here, so
    that the code behind can rely on them.
    """

    name: str = "cluster"
    sites: tuple[Site, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        names = [site.name for site in self.sites]
        doubled = [name for name, n in Counter(names).items() if n > 1]
        if doubled:
            raise ValueError(f"sites: the name {doubled[0]!r} is used twice")
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise ValueError(
                        f"links: between {list(link.between)}: no site {end!r}; sites are {', '.join(names)}"
                    )
        pairs = Counter(frozenset(link.between) for link in self.links)
        for pair, n in pairs.items():
            if n > 1:
                raise ValueError(f"links: {sorted(pair)} are joined twice; give one link with the summed bandwidth")
        reached = self._reachable(names[0])
        cut_off = [name for name in names if name not in reached]
        if cut_off:
            raise ValueError(f"links: no path from {names[0]!r} to {cut_off[0]!r}; add a link between them")
        return self

    def _reachable(self, start: str) -> set[str]:
        reached, frontier = {start}, [start]
        while frontier:
            here = frontier.pop()
            for link in self.links:
                if here in link.between:
                    there = link.between[0] if link.between[1] == here else link.between[1]
                    if there not in reached:
                        reached.add(there)
                        frontier.append(there)
        return reached

    @property
    def gpus(self) -> int:
        """Accelerators over all sites."""
        return sum(site.gpus for site in self.sites)

    def site(self, name: str) -> Site:
        """The site called `name`; KeyError if there is none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)


class Placement(Config):
    """Where each worker of a job sits: role → site of each of its workers, in rank order. One worker takes one GPU."""

    roles: dict[str, tuple[str, ...]]

    def gpus_by_site(self) -> dict[str, int]:
        """How many GPUs the placement takes at each site."""
        return dict(Counter(site for sites in self.roles.values() for site in sites))

    def shortages(self, cluster: ClusterSpec) -> list[str]:
        """What `cluster` lacks for this placement, one readable line per site; empty when it fits."""
        have = {site.name: site.gpus for site in cluster.sites}
        lines = []
        for site, need in sorted(self.gpus_by_site().items()):
            if site not in have:
                lines.append(f"no site {site!r}; sites are {', '.join(have)}")
            elif need > have[site]:
                lines.append(f"site {site!r} has {have[site]} GPUs, the placement needs {need}")
        return lines
