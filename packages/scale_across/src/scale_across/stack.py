"""The software stack of a run: which kernels are fused, what overlaps, how fast the host launches.

Two runs of one plan on one accelerator differ by tens of percent because of these, so they are input, described once
per framework and generation in `data/stacks/*.yaml`, never fitted per row.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field

from common import config
from common.config import Config, ConfigError
from scale_across.compute import StackNumbers

_FOLDER = Path(__file__).parent / "data" / "stacks"


class Stack(Config):
    """One framework in one generation."""

    name: str
    description: str
    flash_attention: bool
    dispatch_us: float = Field(ge=0)
    """Host time per launched kernel: a microbatch takes at least kernels x this."""
    norm_passes: float = Field(ge=0)
    """Reads and writes of a [tokens, hidden] tensor by both norms of a layer, forward."""
    residual_passes: float = Field(ge=0)
    """The same for both residual additions (with bias and dropout where the stack has them)."""
    activation_passes: float = Field(ge=0)
    """Reads and writes of a [tokens, ffn] tensor by the activation, forward."""
    kernels_forward: float = Field(ge=0)
    """Kernels of a layer besides its GEMMs, forward."""
    kernels_backward: float = Field(ge=0)
    selective_attention: bool
    """Selective recompute repeats the attention core (Megatron-LM)."""
    selective_gemms: float = Field(ge=0, le=1)
    """Selective recompute repeats this share of the GEMMs and all element-wise operators (torchtitan: half)."""
    accumulate_bytes: float = Field(ge=0)
    """Extra memory traffic per parameter and microbatch to add a gradient to the fp32 sum; 0 when the GEMM does it."""
    gradient_bytes: float = Field(gt=0)
    """Bytes per gradient element that a weight-gradient GEMM writes: 2 half precision, 8 when it adds to fp32."""
    optimizer_bytes: float = Field(gt=0)
    """Memory traffic of the optimizer per parameter: unscale, norm, Adam, cast."""
    collective_us: float = Field(ge=0)
    """Fixed cost of a collective that nothing hides: stream synchronisation, waiting for the last rank's launch."""
    head_passes: float = Field(ge=0)
    """Reads and writes of the fp32 logits by cast, cross-entropy and its backward pass."""
    tp_overlap: float = Field(ge=0, le=1)
    """Share of tensor-parallel communication hidden behind GEMMs."""
    tp_backward_overlap: float = Field(ge=0, le=1)
    """Share of the backward all-reduces hidden behind weight gradients; with sequence parallelism half of it."""
    dp_overlap: float = Field(ge=0, le=1)
    """Share of the backward (gradients) and forward (parameters) time that data-parallel traffic may hide behind."""
    pp_overlap: float = Field(ge=0, le=1)
    cp_overlap: float = Field(ge=0, le=1)
    ep_overlap: float = Field(ge=0, le=1)
    scatter_gather: bool
    """Pipeline messages are split over tensor ranks (and gathered in the node on arrival)."""
    reduce_bytes: float = Field(gt=0)
    """Bytes per gradient element on the wire of data parallelism."""

    def numbers(self) -> StackNumbers:
        """Plain numbers for the formulas."""
        return StackNumbers(
            dispatch_s=self.dispatch_us * 1e-6,
            flash=float(self.flash_attention),
            norm_passes=self.norm_passes,
            activation_passes=self.activation_passes,
            residual_passes=self.residual_passes,
            kernels_forward=self.kernels_forward,
            kernels_backward=self.kernels_backward,
            selective_attention=float(self.selective_attention),
            selective_gemms=self.selective_gemms,
            accumulate_bytes=self.accumulate_bytes,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            collective_s=self.collective_us * 1e-6,
            head_passes=self.head_passes,
            tp_overlap=self.tp_overlap,
            tp_backward_overlap=self.tp_backward_overlap,
            dp_overlap=self.dp_overlap,
            pp_overlap=self.pp_overlap,
            cp_overlap=self.cp_overlap,
            ep_overlap=self.ep_overlap,
            scatter_gather=float(self.scatter_gather),
            reduce_bytes=self.reduce_bytes,
        )


def names() -> list[str]:
    """All stacks that ship with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@lru_cache(maxsize=64)
def stack(name_or_path: str) -> Stack:
    """Load a stack by name, or from a YAML file.

    Raises:
        ConfigError: neither a known name nor a file; the message lists the names.
    """
    shipped = _FOLDER / f"{name_or_path}.yaml"
    if shipped.is_file():
        return config.load(shipped, Stack)
    if name_or_path.endswith((".yaml", ".yml", ".json")):
        return config.load(name_or_path, Stack)
    raise ConfigError(f"stack {name_or_path!r} is unknown; known are {', '.join(names())}, or give a YAML file")
