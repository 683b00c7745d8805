"""Batched sampling with a key-value cache of fixed size; token ids and their log-probabilities are kept as drawn.

The forward pass is written out for the Llama architecture (RMS norm, rotary positions, grouped-query attention, SwiGLU)
on fused weights. On small models most of the time of transformers' `generate` is not arithmetic; this loop has little
else. Agreement with the model's own forward pass is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Generation:
    """Sampled answers: ids B x A, which of them count (up to and including the end token), log-probabilities."""

    ids_BA: torch.Tensor
    mask_BA: torch.Tensor
    logprob_BA: torch.Tensor


@dataclass(frozen=True)
class _Layer:
    norm_in: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Sampler:
    """Draws answers from a Llama model. Call `refresh` after its weights change."""

    def __init__(self, model: LlamaForCausalLM, pad: int, eos: int) -> None:
        self.model, self.pad, self.eos = model, pad, eos
        shape = model.config
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // self.heads
        self.eps = shape.rms_norm_eps
        self.refresh()

    def refresh(self) -> None:
        """Fuse the model's current weights for sampling."""
        self.layers = [
            _Layer(
                norm_in=layer.input_layernorm.weight.data,
                qkv=torch.cat(
                    [p.weight.data for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
                ),
                out=layer.self_attn.o_proj.weight.data,
                norm_mlp=layer.post_attention_layernorm.weight.data,
                gate_up=torch.cat([layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data]),
                down=layer.mlp.down_proj.weight.data,
            )
            for layer in self.model.model.layers
        ]

    @torch.no_grad()
    def sample(
        self,
        prompt_BP: torch.Tensor,
        max_tokens: int,
        rng: torch.Generator,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> Generation:
        """Draw one answer per (left-padded) prompt, until the end token or `max_tokens`.

        The recorded log-probabilities are those of softmax(logits / temperature); see `policy.answer_logprobs`.
        """
        B, P = prompt_BP.shape
        total = P + max_tokens
        cache = [
            torch.empty(2, B, self.kv_heads, total, self.head_dim, dtype=self.layers[0].qkv.dtype) for _ in self.layers
        ]
        attended_BT = torch.zeros(B, total, dtype=torch.bool)
        attended_BT[:, :P] = prompt_BP != self.pad
        position_B = attended_BT.sum(1)
        cos_TD, sin_TD = self._rotary(total)
        position_BP = (attended_BT[:, :P].long().cumsum(1) - 1).clamp_min(0)
        logits_BV = self._forward(prompt_BP, position_BP, 0, attended_BT, cache, cos_TD, sin_TD)
        ids_BA = torch.full((B, max_tokens), self.pad)
        mask_BA = torch.zeros(B, max_tokens)
        logprob_BA = torch.zeros(B, max_tokens)
        alive_B = torch.ones(B, dtype=torch.bool)
        for t in range(max_tokens):
            logprob_BV = functional.log_softmax(logits_BV.float() / temperature, dim=-1)
            token_B = torch.multinomial(_restrict(logprob_BV, top_k, top_p), 1, generator=rng).squeeze(1)
            ids_BA[:, t] = torch.where(alive_B, token_B, self.pad)
            mask_BA[:, t] = alive_B
            logprob_BA[:, t] = logprob_BV.gather(1, token_B.unsqueeze(1)).squeeze(1) * alive_B
            alive_B = alive_B & (token_B != self.eos)
            if t == max_tokens - 1 or not alive_B.any():
                break
            attended_BT[:, P + t] = True
            logits_BV = self._forward(
                token_B.unsqueeze(1), (position_B + t).unsqueeze(1), P + t, attended_BT, cache, cos_TD, sin_TD
            )
        return Generation(ids_BA, mask_BA, logprob_BA)

    def _rotary(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.model.model.rotary_emb
        angle_TD = torch.arange(positions).float()[:, None] * rotary.inv_freq.float()[None, :]
        angle_TD = torch.cat([angle_TD, angle_TD], dim=-1)
        scale = float(getattr(rotary, "attention_scaling", 1.0))
        return angle_TD.cos() * scale, angle_TD.sin() * scale

    def _forward(
        self,
        ids_BS: torch.Tensor,
        position_BS: torch.Tensor,
        start: int,
        attended_BT: torch.Tensor,
        cache: list[torch.Tensor],
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Run S new tokens that stand at cache slots start..start+S; returns the logits after the last one, B x V."""
        B, S = ids_BS.shape
        stop = start + S
        cos, sin = cos_TD[position_BS].unsqueeze(1), sin_TD[position_BS].unsqueeze(1)
        mask = attended_BT[:, None, None, :stop]
        if S > 1:
            mask = mask & torch.ones(S, stop, dtype=torch.bool).tril(stop - S)
            mask = mask | torch.eye(S, stop, dtype=torch.bool)  # a padded query must attend to something
        x_BSD = self.model.model.embed_tokens.weight[ids_BS]
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer, kv in zip(self.layers, cache, strict=True):
            qkv = functional.linear(self._norm(x_BSD, layer.norm_in), layer.qkv)
            q, k, v = qkv.split([q_width, kv_width, kv_width], dim=-1)
            q = _rotate(q.view(B, S, self.heads, self.head_dim).transpose(1, 2), cos, sin)
            kv[0, :, :, start:stop] = _rotate(k.view(B, S, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
            kv[1, :, :, start:stop] = v.view(B, S, self.kv_heads, self.head_dim).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                q, kv[0, :, :, :stop], kv[1, :, :, :stop], attn_mask=mask, enable_gqa=self.heads != self.kv_heads
            )
            x_BSD = x_BSD + functional.linear(attended.transpose(1, 2).reshape(B, S, q_width), layer.out)
            gate, up = functional.linear(self._norm(x_BSD, layer.norm_mlp), layer.gate_up).chunk(2, dim=-1)
            x_BSD = x_BSD + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(self._norm(x_BSD[:, -1], self.model.model.norm.weight), self.model.lm_head.weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _restrict(logprob_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities of the tokens that may be drawn: the k most likely, and of those the smallest set of mass top_p."""
    probability_BV = logprob_BV.exp()
    if 0 < top_k < probability_BV.shape[1]:
        least = probability_BV.topk(top_k, dim=1).values[:, -1:]
        probability_BV = torch.where(probability_BV >= least, probability_BV, 0.0)
    if top_p < 1:
        probability_BV = probability_BV / probability_BV.sum(1, keepdim=True)
        ordered, index = probability_BV.sort(dim=1, descending=True)
        ordered = torch.where(ordered.cumsum(1) - ordered < top_p, ordered, 0.0)
        probability_BV = torch.zeros_like(probability_BV).scatter(1, index, ordered)
    return probability_BV
