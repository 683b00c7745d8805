"""When messages move relative to compute: the policies that a simulated step is run under."""

from __future__ import annotations

from pydantic import Field

from common.config import Config


class OverlapPolicy(Config):
    """The defaults hide as much as streams allow."""

    send_exposed: float = Field(default=0.0, ge=0, le=1)
    """Share of a boundary message that its sender's compute stream waits for: 0 eager sends, 1 blocking ones."""
    early_receive: bool = True
    """Receives are posted ahead. False: a message starts when its receiver has nothing else left to do."""
    buckets: int = Field(default=1, ge=1, le=1024)
    """Pieces of a chunk's gradients and parameters. Gradient piece k of n may go when k/n of the chunk's last gradient
    block have run; parameter piece k is needed when (k - 1)/n of its first forward block have run."""
    reduce_overlap: bool = True
    """False: gradients of a stage wait for the end of its last block."""
    prefetch: int = Field(default=0, ge=0)
    """Parameter gathers under way ahead of the chunk in use; 0: all are requested at the start of the step."""
    pipeline_priority: bool = True
    """Boundary messages go first and interrupt collectives on the same link; False: in order of readiness."""
    stagger: int = Field(default=1, ge=1, le=64)
    """Pipeline replicas that take turns on a shared link, message by message (Atlas, arXiv 2411.14458). Without it
    their messages go at once, and each arrives when all have."""
