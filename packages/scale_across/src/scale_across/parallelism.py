"""How a training step is split: the parallel degrees of one candidate, and arrays of many.

Ranks are laid out densely. Innermost to outermost: TP, CP, then DP and PP (`order` says which of these two is
outermost, and so which of them crosses sites). Experts are spread over the CP x DP ranks, and over TP ranks too when
an expert is split less than the rest (`etp` < `tp`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.config import ConfigError
from scale_across.model import ModelShape, Moe

NONE, SELECTIVE, FULL = 0, 1, 2
RECOMPUTE = {"none": NONE, "selective": SELECTIVE, "full": FULL}
PP_OUTERMOST, DP_OUTERMOST = 0, 1
ORDER = {"pp": PP_OUTERMOST, "dp": DP_OUTERMOST}
"""Keys name the outermost axis. Megatron-LM's default is `pp`; Meta's production order TP, CP, PP, DP is `dp`."""


class Parallelism(NamedTuple):
    """One candidate. All integers, so that a batch of candidates is an int64 array with these columns."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor-parallel degree inside an expert."""
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    """Model chunks per pipeline stage (interleaving)."""
    microbatch: int = 1
    zero: int = 0
    """0 replicated, 1 optimizer, 2 gradients too, 3 parameters too (FSDP)."""
    shard: int = 0
    """Ranks over which ZeRO shards; 0 means all of DP x CP. Fewer is HSDP: sharded inside, replicated across."""
    recompute: int = NONE
    sp: int = 0
    """1: norms and residuals are split over TP ranks too (sequence parallelism)."""
    order: int = PP_OUTERMOST
    reduction: int = 0
    """collectives.RING or collectives.HIERARCHICAL, for data parallelism."""

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.pp * self.dp


FIELDS = Parallelism._fields


def candidates(**columns: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """An [N, fields] array from broadcastable columns; what is not given takes the default of `Parallelism`.

    Raises:
        ConfigError: an unknown column.
    """
    unknown = set(columns) - set(FIELDS)
    if unknown:
        raise ConfigError(f"candidates: unknown column {min(unknown)!r}; columns are {', '.join(FIELDS)}")
    defaults = Parallelism()
    arrays = np.broadcast_arrays(*(np.asarray(columns.get(f, getattr(defaults, f)), np.int64) for f in FIELDS))
    return np.stack([array.ravel() for array in arrays], axis=1)


def check(plan: Parallelism, model: ModelShape, *, gpus: int, global_batch: int, seq_len: int) -> None:
    """Raise ConfigError, naming key, value and valid values, when a plan does not divide its model or its job."""
    for name in ("tp", "cp", "ep", "etp", "pp", "dp", "chunks", "microbatch"):
        value = getattr(plan, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be a whole number of at least 1")
    _check_choice("zero", plan.zero, range(4))
    _check_choice("recompute", plan.recompute, RECOMPUTE.values())
    if plan.gpus > gpus:
        raise ConfigError(
            f"tp x cp x pp x dp = {plan.tp} x {plan.cp} x {plan.pp} x {plan.dp} = {plan.gpus}, but the cluster has "
            f"{gpus} GPUs; {_instead(plan, gpus)}"
        )
    for count in {layer.attention.heads for layer in model.layers}:
        _divides("tp", plan.tp, count, "attention heads")
    _check_stages(plan, len(model.layers))
    _divides("cp", plan.cp, seq_len, "tokens of a sequence")
    _check_batch(plan, global_batch)
    _check_experts(plan, model)
    if plan.shard and (plan.dp * plan.cp) % plan.shard:
        raise ConfigError(f"shard {plan.shard} does not divide dp x cp = {plan.dp * plan.cp}")


def _check_stages(plan: Parallelism, layers: int) -> None:
    stages = plan.pp * plan.chunks
    if layers + 2 < stages:
        raise ConfigError(f"pp x chunks = {plan.pp} x {plan.chunks} stages for {layers} layers; at most {layers + 2}")
    if layers % stages and (layers + 2) % stages:
        valid = [
            str(v) for v in range(1, layers + 1) if layers % (plan.pp * v) == 0 or (layers + 2) % (plan.pp * v) == 0
        ]
        raise ConfigError(
            f"pp x chunks = {plan.pp} x {plan.chunks} divides neither {layers} layers nor {layers + 2} (embedding and "
            f"head as one each); chunks for pp {plan.pp}: {', '.join(valid) or 'none, change pp'}"
        )


def _check_batch(plan: Parallelism, global_batch: int) -> None:
    if global_batch % (plan.dp * plan.microbatch):
        per_rank = global_batch // plan.dp
        valid = f"microbatch can be {_divisors(per_rank)}" if global_batch % plan.dp == 0 else "change dp"
        raise ConfigError(
            f"dp x microbatch = {plan.dp} x {plan.microbatch} does not divide the global batch of {global_batch} "
            f"sequences; {valid}"
        )
    microbatches = global_batch // (plan.dp * plan.microbatch)
    if plan.chunks > 1 and (plan.pp == 1 or microbatches % plan.pp):
        raise ConfigError(
            f"chunks {plan.chunks}: interleaving needs pp of at least 2 and a multiple of pp microbatches; pp is "
            f"{plan.pp}, {microbatches} microbatches"
        )


def _check_experts(plan: Parallelism, model: ModelShape) -> None:
    experts = {layer.ffn.experts for layer in model.layers if isinstance(layer.ffn, Moe)}
    if not experts:
        if plan.ep != 1:
            raise ConfigError(f"ep is {plan.ep}, but {model.name} has no experts; ep must be 1")
        return
    for count in experts:
        _divides("ep", plan.ep, count, "experts")
    _divides("etp", plan.etp, plan.tp, "tensor ranks (tp)")
    ranks = plan.dp * plan.cp * plan.tp // plan.etp
    _divides("ep", plan.ep, ranks, f"ranks over which experts can be spread (dp x cp x tp / etp = {ranks})")


def _check_choice(name: str, value: int, valid: Iterable[int]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} is {value}; it can be {', '.join(str(v) for v in valid)}")


def _divides(name: str, value: int, whole: int, what: str) -> None:
    if whole % value:
        raise ConfigError(f"{name} is {value}, which does not divide {whole} {what}; it can be {_divisors(whole)}")


def _divisors(whole: int) -> str:
    found = [str(d) for d in range(1, min(whole, 1024) + 1) if whole % d == 0]
    return ", ".join(found[:16]) + (", ..." if len(found) > 16 else "")


def _instead(plan: Parallelism, gpus: int) -> str:
    rest = plan.tp * plan.cp * plan.pp
    if gpus % rest == 0:
        return f"dp {gpus // rest} would fill it"
    return f"tp x cp x pp = {rest} does not divide {gpus}"


def describe(plan: Parallelism) -> str:
    """Short text: only what differs from one GPU and the defaults."""
    parts = [f"{name} {value}" for name, value in plan._asdict().items() if value != getattr(Parallelism(), name)]
    return ", ".join(parts) or "one GPU"


def from_mapping(values: dict[str, Any]) -> Parallelism:
    """A candidate from names and numbers; `recompute` and `order` may be words."""
    fixed = dict(values)
    for name, words in (("recompute", RECOMPUTE), ("order", ORDER)):
        if isinstance(fixed.get(name), str):
            if fixed[name] not in words:
                raise ConfigError(f"{name} is {fixed[name]!r}; it can be {', '.join(words)}")
            fixed[name] = words[fixed[name]]
    return Parallelism(**fixed)
