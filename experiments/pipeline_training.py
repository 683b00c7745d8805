"""A small transformer cut into pipeline chunks whose backward pass comes in two halves: D, then W whenever wanted.

Weights enter through two functions of ours that, in the backward pass, compute the gradient of their input at once and
leave (input, output gradient) behind. So D is `torch.autograd.grad` with respect to the chunk's input, and W multiplies
what was left: nothing is computed twice (the split of zero-bubble pipelines, Qi et al. 2023, arXiv 2401.10241).

Names: B sequences of a microbatch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from pydantic import Field, model_validator

from common.config import Config

LeftOver = tuple[str, torch.Tensor, torch.Tensor]
"""(weight, input of its product, gradient of its output): what W needs."""


class Shape(Config):
    """The model and the data of a step."""

    layers: int = Field(default=8, gt=0)
    width: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    vocabulary: int = Field(default=64, gt=1)
    tokens: int = Field(default=128, gt=1)
    """Of a sequence."""
    sequences: int = Field(default=1, gt=0)
    """Of a microbatch."""
    seed: int = 0

    @model_validator(mode="after")
    def _heads_divide(self) -> Shape:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")
        return self

    @property
    def boundary_bytes(self) -> int:
        """Activations, or their gradients, of one microbatch between two chunks."""
        return 4 * self.sequences * self.tokens * self.width


def batch(shape: Shape, step: int, microbatch: int) -> torch.Tensor:
    """Tokens [B, T + 1] of a noisy arithmetic sequence, so that there is something to learn."""
    generator = torch.Generator().manual_seed(hash((shape.seed, step, microbatch)) % 2**31)
    at = torch.randint(shape.vocabulary, (shape.sequences,), generator=generator)
    rows = [at]
    for _ in range(shape.tokens):
        jump = torch.randint(shape.vocabulary, at.shape, generator=generator)
        at = torch.where(torch.rand(at.shape, generator=generator) < 0.1, jump, (3 * at + 7) % shape.vocabulary)
        rows.append(at)
    return torch.stack(rows, dim=1)


def layer_range(shape: Shape, virtual: int, virtuals: int) -> range:
    """Layers of a virtual stage; equal parts as far as possible."""
    return range(shape.layers * virtual // virtuals, shape.layers * (virtual + 1) // virtuals)


def initial_weights(shape: Shape, virtual: int, virtuals: int) -> dict[str, torch.Tensor]:
    """Weights of a chunk by name; each depends on the seed and its name only, not on how the model is cut."""
    c = shape.width
    sizes: dict[str, tuple[int, int]] = {}
    if virtual == 0:
        sizes |= {"embed": (shape.vocabulary, c), "position": (shape.tokens, c)}
    for i in layer_range(shape, virtual, virtuals):
        sizes |= {f"{i}.qkv": (3 * c, c), f"{i}.out": (c, c), f"{i}.up": (4 * c, c), f"{i}.down": (c, 4 * c)}
    if virtual == virtuals - 1:
        sizes["head"] = (shape.vocabulary, c)
    weights = {}
    for name, size in sizes.items():
        layer, _, kind = name.rpartition(".")
        number = (int(layer) + 1) * 10 if layer else 0
        number += ("embed", "position", "head", "qkv", "out", "up", "down").index(kind)
        generator = torch.Generator().manual_seed(shape.seed * 100_003 + number)
        weights[name] = torch.randn(size, generator=generator) * (0.02 if kind in ("embed", "position") else c**-0.5)
    return weights


class _Product(torch.autograd.Function):
    """x @ w.T whose weight gradient is left for later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, name: str, left: list[LeftOver]) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.name, ctx.left = name, left
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, w = ctx.saved_tensors
        ctx.left.append((ctx.name, x, gradient))
        return gradient @ w, None, None, None


@dataclass
class Passed:
    """One microbatch in a chunk between F and W."""

    into: torch.Tensor
    """[B, T, C], the chunk's input."""
    out: torch.Tensor
    """[B, T, C], or the loss."""
    tokens_BT: torch.Tensor
    left: list[LeftOver]


class Chunk:
    """One virtual stage: its weights, their gradients, and F, D, W."""

    def __init__(self, shape: Shape, virtual: int, virtuals: int, loss_share: float) -> None:
        """`loss_share`: weight of a microbatch's mean loss in the step's loss."""
        self.shape, self.loss_share = shape, loss_share
        self.first, self.last = virtual == 0, virtual == virtuals - 1
        self.layers = layer_range(shape, virtual, virtuals)
        self.weights = initial_weights(shape, virtual, virtuals)
        sizes = [w.numel() for w in self.weights.values()]
        self.flat_gradient = torch.zeros(sum(sizes))
        parts = self.flat_gradient.split(sizes)
        self.gradients = {
            name: part.view_as(self.weights[name]) for name, part in zip(self.weights, parts, strict=True)
        }

    def forward(self, into: torch.Tensor | None, tokens_BU: torch.Tensor) -> Passed:
        """F. `into` [B, T, C] (None for the first chunk), `tokens_BU` [B, T + 1]; `out` is the loss of the last."""
        tokens_BT = tokens_BU[:, :-1]
        if into is None:
            into = self.weights["embed"][tokens_BT] + self.weights["position"]
        into = into.detach().requires_grad_()
        left: list[LeftOver] = []
        x = into
        for i in self.layers:
            x = self._layer(x, i, left)
        if self.last:
            logits_BTV = _Product.apply(nnf.rms_norm(x, (x.shape[-1],)), self.weights["head"], "head", left)
            x = nnf.cross_entropy(logits_BTV.flatten(0, 1), tokens_BU[:, 1:].flatten()) * self.loss_share
        return Passed(into, x, tokens_BT, left)

    def _layer(self, x: torch.Tensor, i: int, left: list[LeftOver]) -> torch.Tensor:
        def product(y: torch.Tensor, kind: str) -> torch.Tensor:
            made: torch.Tensor = _Product.apply(y, self.weights[f"{i}.{kind}"], f"{i}.{kind}", left)
            return made

        return layer(x, self.shape.heads, product)

    def input_gradient(self, passed: Passed, gradient: torch.Tensor | None) -> torch.Tensor:
        """D: gradient of the loss by the chunk's input [B, T, C], from that by its output (None: it is the loss)."""
        (found,) = torch.autograd.grad(passed.out, passed.into, gradient)
        if self.first:
            passed.left.append(("embed", passed.tokens_BT, found))
        return found

    @torch.no_grad()
    def weight_gradient(self, passed: Passed) -> None:
        """W: add to `gradients` what D left."""
        for name, x, gradient in passed.left:
            if name == "embed":
                self.gradients["embed"].index_add_(0, x.flatten(), gradient.flatten(0, 1))
                self.gradients["position"].add_(gradient.sum(dim=0))
            else:
                self.gradients[name].addmm_(gradient.flatten(0, 1).T, x.flatten(0, 1))
        passed.left.clear()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Plain gradient descent; gradients are zero afterwards."""
        for name, weight in self.weights.items():
            weight.sub_(self.gradients[name], alpha=rate)
        self.flat_gradient.zero_()


def layer(x_BTC: torch.Tensor, heads: int, product: Any) -> torch.Tensor:
    """One transformer layer; `product(y, kind)` multiplies by the weight "qkv", "out", "up" or "down"."""
    b, t, c = x_BTC.shape
    qkv = product(nnf.rms_norm(x_BTC, (c,)), "qkv")
    q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in qkv.split(c, dim=2))
    seen_BTC = nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
    x_BTC = x_BTC + product(seen_BTC, "out")
    return x_BTC + product(nnf.gelu(product(nnf.rms_norm(x_BTC, (c,)), "up")), "down")


def single_process_losses(shape: Shape, microbatches: int, steps: int, rate: float) -> list[float]:
    """The same training in one process with plain autograd and no pipeline: loss of every step."""
    weights = {name: w.requires_grad_() for name, w in initial_weights(shape, 0, 1).items()}
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for microbatch in range(microbatches):
            tokens_BU = batch(shape, step, microbatch)
            x = weights["embed"][tokens_BU[:, :-1]] + weights["position"]
            for i in range(shape.layers):
                x = layer(x, shape.heads, lambda y, kind, i=i: nnf.linear(y, weights[f"{i}.{kind}"]))
            logits_BTV = nnf.linear(nnf.rms_norm(x, (shape.width,)), weights["head"])
            total = total + nnf.cross_entropy(logits_BTV.flatten(0, 1), tokens_BU[:, 1:].flatten()) / microbatches
        total.backward()
        losses.append(float(total.detach()))
        with torch.no_grad():
            for weight in weights.values():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=rate)
                weight.grad = None
    return losses
