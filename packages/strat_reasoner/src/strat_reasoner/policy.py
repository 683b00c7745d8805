"""Models that write reasoning: how they are made, their weights as one flat vector, and their log-probabilities."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from strat_reasoner.config import ModelConfig
from strat_reasoner.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

MAX_POSITIONS = 128


def stream(seed: int, role: str, *numbers: int) -> int:
    """A seed for one random stream, so that every role, rank and step draws from its own and none depends on timing."""
    return zlib.crc32(repr((seed, role, *numbers)).encode()) | seed << 32 & 0x7FFFFFFF00000000


def numpy_rng(seed: int, role: str, *numbers: int) -> np.random.Generator:
    """A numpy generator for one stream."""
    return np.random.default_rng(stream(seed, role, *numbers))


def torch_rng(seed: int, role: str, *numbers: int) -> torch.Generator:
    """A torch generator for one stream."""
    return torch.Generator().manual_seed(stream(seed, role, *numbers))


def build_model(config: ModelConfig, vocabulary: Vocabulary, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model; the same seed gives the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds to import, and not every role has a model

    torch.manual_seed(stream(seed, "init"))
    shape = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=vocabulary.pad,
        bos_token_id=vocabulary.bos,
        eos_token_id=vocabulary.eos,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(shape).float().eval()


def flatten(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector (a copy), in the order of `parameters()`."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def unflatten(model: torch.nn.Module, flat: torch.Tensor) -> None:
    """Copy a vector made by `flatten` into the model's parameters; the vector stays the caller's own.

    Raises:
        ValueError: the vector belongs to a model of another size.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if flat.numel() != count:
        raise ValueError(f"weights hold {flat.numel()} parameters, the model has {count}")
    offset = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()


def answer_logprobs(
    model: LlamaForCausalLM,
    prompt_BP: torch.Tensor,
    answer_BA: torch.Tensor,
    mask_BA: torch.Tensor,
    pad: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probability of each answer token under softmax(logits / temperature): shape B x A, zero where masked.

    This is the distribution that both the sampler records and the objective trains. Top-k and top-p only restrict what
    is drawn; they do not enter it, so that a ratio can never be 0 or infinite.

    Args:
        prompt_BP: left-padded prompt ids.
        answer_BA: right-padded answer ids, exactly the sampled ones.
        mask_BA: which answer tokens count.
    """
    attended_BT = torch.cat([prompt_BP != pad, mask_BA.bool()], dim=1)
    position_BT = (attended_BT.long().cumsum(1) - 1).clamp_min(0)
    hidden_BTD = model.model(
        input_ids=torch.cat([prompt_BP, answer_BA], dim=1),
        attention_mask=attended_BT.long(),
        position_ids=position_BT,
        use_cache=False,
    ).last_hidden_state
    before = prompt_BP.shape[1] - 1  # the last prompt token predicts the first answer token
    logits_BAV = model.lm_head(hidden_BTD[:, before:-1])
    logprob_BAV = functional.log_softmax(logits_BAV.float() / temperature, dim=-1)
    chosen_BA = logprob_BAV.gather(-1, answer_BA.unsqueeze(-1)).squeeze(-1)
    return chosen_BA * mask_BA


def pad_prompts(prompts: list[list[int]], pad: int) -> torch.Tensor:
    """Left-pad prompts to one length."""
    longest = max(len(prompt) for prompt in prompts)
    return torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
