"""Accelerators: published peaks, memory and fabric, and a few calibrated efficiencies, one YAML file each.

The files are in `data/accelerators/`. A file of one's own with the same keys works wherever a name does.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field

from common import config
from common.config import Config, ConfigError
from scale_across.compute import GpuNumbers

_FOLDER = Path(__file__).parent / "data" / "accelerators"


class Calibration(Config):
    """What no data sheet tells. Shares are of the peak; see docs/accuracy.md for how they were found."""

    gemm_fraction: float = Field(gt=0, le=1)
    gemm_k0: float = Field(ge=0)
    """Depth of a tile's prologue and epilogue, in elements of k."""
    unaligned_fraction: float = Field(gt=0, le=1)
    """Of the GEMM rate, when a side of the matrix is no multiple of 16 bytes."""
    memory_fraction: float = Field(gt=0, le=1)
    attention_fraction: float = Field(gt=0, le=1)
    attention_backward_fraction: float = Field(gt=0, le=1)
    kernel_gap_us: float = Field(ge=0)
    fabric_fraction: float = Field(gt=0, le=1)
    """Share of the node fabric's bandwidth that collectives reach."""
    network_fraction: float = Field(gt=0, le=1)
    source: str
    """The measurements that these numbers were fitted to, or the accelerator they were taken over from."""


class Accelerator(Config):
    """One kind of accelerator. Bandwidths are per GPU and direction."""

    name: str
    peak_tflops: dict[str, float]
    """Dense peak by dtype: bf16, fp16, fp8, tf32, fp32."""
    memory_gib: float = Field(gt=0)
    memory_gbytes_per_s: float = Field(gt=0)
    sms: int = Field(gt=0)
    node_gpus: int = Field(gt=0)
    """GPUs that share the fast fabric (NVLink domain)."""
    fabric_gbytes_per_s: float = Field(gt=0)
    fabric_latency_us: float = Field(ge=0)
    network_gbps: float = Field(gt=0)
    network_latency_us: float = Field(ge=0)
    calibration: Calibration

    def numbers(self, dtype: str = "bf16") -> GpuNumbers:
        """Plain numbers for the formulas.

        Raises:
            ConfigError: this accelerator does not compute in `dtype`.
        """
        if dtype not in self.peak_tflops:
            raise ConfigError(
                f"dtype {dtype!r}: {self.name} computes in {', '.join(sorted(self.peak_tflops))}; choose one of these"
            )
        c = self.calibration
        return GpuNumbers(
            flops=self.peak_tflops[dtype] * 1e12,
            bytes_per_s=self.memory_gbytes_per_s * 1e9,
            sms=float(self.sms),
            memory_bytes=self.memory_gib * 2**30,
            gemm_fraction=c.gemm_fraction,
            gemm_k0=c.gemm_k0,
            unaligned_fraction=c.unaligned_fraction,
            memory_fraction=c.memory_fraction,
            attention_fraction=c.attention_fraction,
            attention_backward_fraction=c.attention_backward_fraction,
            gap_s=c.kernel_gap_us * 1e-6,
        )


def names() -> list[str]:
    """All accelerators that ship with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@lru_cache(maxsize=64)
def accelerator(name_or_path: str) -> Accelerator:
    """Load an accelerator by name, or from a YAML file.

    Raises:
        ConfigError: neither a known name nor a file; the message lists the names.
    """
    shipped = _FOLDER / f"{name_or_path}.yaml"
    if shipped.is_file():
        return config.load(shipped, Accelerator)
    if name_or_path.endswith((".yaml", ".yml", ".json")):
        return config.load(name_or_path, Accelerator)
    raise ConfigError(f"accelerator {name_or_path!r} is unknown; known are {', '.join(names())}, or give a YAML file")
