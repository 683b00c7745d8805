"""The network inside one site: tiers from a specification, a preset or the accelerator's data sheet.

Presets are YAML files: `data/networks/` holds tiers inside a site, `data/clusters/` whole clusters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common import config
from common.config import Config, ConfigError
from common.spec import ClusterSpec, Site, TierSpec
from scale_across.hardware import accelerator

_DATA = Path(__file__).parent / "data"
GBPS = 1e9 / 8
"""Bytes/s in one Gb/s."""
_FLAT = (TierSpec(name="node"), TierSpec(name="site"))
"""Nodes on one network without oversubscription."""


class SiteNetwork(Config):
    """A file of `data/networks/`: the tiers inside a site, innermost first."""

    name: str
    source: str
    tiers: tuple[TierSpec, ...]


@dataclass(frozen=True)
class Tier:
    """One level of a site's network."""

    name: str
    gpus: int
    """GPUs in one domain."""
    port_bytes_per_s: float
    """Of one GPU, before oversubscription."""
    oversubscription: float
    latency_s: float


def site_tiers(site: Site) -> tuple[Tier, ...]:
    """The tiers of a site, innermost first, up to the first that holds all of it.

    Raises:
        ConfigError: unknown network or accelerator, domains that do not grow or nest, or that leave GPUs out.
    """
    given = site.tiers or (load_network(site.network).tiers if site.network else _FLAT)
    where = f"site {site.name!r}: tiers"
    tiers: list[Tier] = []
    for t, tier in enumerate(given):
        if tier.gpus is None and 0 < t < len(given) - 1:
            raise ConfigError(f"{where}: {tier.name!r}: gpus: required for a tier between node and site")
        gpus = min(site.gpus, tier.gpus or (site.gpus_per_node if t == 0 and len(given) > 1 else site.gpus))
        below = tiers[-1] if tiers else None
        if below and (gpus <= below.gpus or (gpus % below.gpus and gpus < site.gpus)):
            raise ConfigError(
                f"{where}: {tier.name!r}: gpus {gpus}: must be a multiple of {below.gpus}, the domain of {below.name!r}"
            )
        tiers.append(_resolve(site, tier, gpus, inside_node=t == 0))
        if gpus == site.gpus:
            return tuple(tiers)
    raise ConfigError(
        f"{where}: the outermost tier {tiers[-1].name!r} holds {tiers[-1].gpus} of {site.gpus} GPUs; add one above it"
    )


def _resolve(site: Site, tier: TierSpec, gpus: int, inside_node: bool) -> Tier:
    """Fill what the tier leaves open from the accelerator's fabric or network port."""
    port, latency_s = tier.bandwidth_gbps, tier.latency_us
    if port is None or latency_s is None:
        chip = accelerator(site.accelerator)
        fabric = chip.fabric_gbytes_per_s * 8, chip.fabric_latency_us
        default_gbps, default_us = fabric if inside_node else (chip.network_gbps, chip.network_latency_us)
        port = default_gbps if port is None else port
        latency_s = default_us * tier.latency_factor if latency_s is None else latency_s
    return Tier(tier.name, gpus, port * GBPS, tier.oversubscription, latency_s * 1e-6)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_DATA / folder).glob("*.yaml"))


def _find(kind: str, folder: str, name_or_path: str) -> Path:
    shipped = _DATA / folder / f"{name_or_path}.yaml"
    if name_or_path in _names(folder):
        return shipped
    if name_or_path.endswith((".yaml", ".yml", ".json")):
        return Path(name_or_path)
    raise ConfigError(f"{kind} {name_or_path!r}: unknown; shipped are {', '.join(_names(folder))}, or give a YAML file")


def load_network(name_or_path: str) -> SiteNetwork:
    """Tiers inside a site, by name (`data/networks/`) or from a YAML file."""
    return config.load(_find("network", "networks", name_or_path), SiteNetwork)


def load_cluster(name_or_path: str | os.PathLike[str]) -> ClusterSpec:
    """A cluster by name (`data/clusters/`) or from a YAML file."""
    return config.load(_find("cluster", "clusters", os.fspath(name_or_path)), ClusterSpec)
