"""The clipped multi-turn surrogate with a penalty for leaving the warm start.

    L = - sum_tokens weight * min(r A, clip(r, 1-e, 1+e) A), bounded below by c A for A < 0 (dual clip), + beta * KL

with r = pi / pi_old per token and weight = 1 / (trajectories * turns of the trajectory * tokens of the turn): the mean
over trajectories, then turns, then tokens (arXiv 2605.04906). A trajectory is one player's turns of one game. KL is the
estimator exp(d) - d - 1 with d = log pi_ref - log pi (Schulman 2020), which is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from strat_reasoner.config import ObjectiveConfig
from strat_reasoner.rollout import RolloutBatch


@dataclass(frozen=True)
class Shard:
    """What the objective needs of each sample that enters the loss; plain arrays that travel to a learner rank."""

    prompt_NP: np.ndarray
    answer_NA: np.ndarray
    mask_NA: np.ndarray
    logprob_NA: np.ndarray
    advantage_N: np.ndarray
    weight_N: np.ndarray
    """Weight of each token of the sample; summed over the tokens of all shards it gives 1."""

    def __len__(self) -> int:
        return len(self.advantage_N)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what travels to the learner rank."""
        return sum(array.nbytes for array in vars(self).values())


def make_shards(batch: RolloutBatch, advantage_N: np.ndarray, ranks: int) -> list[Shard]:
    """Drop samples without an advantage (NaN), weigh the rest over the whole batch, and deal them to `ranks` shards."""
    keep = np.flatnonzero(np.isfinite(advantage_N))
    kept = batch.rows(keep)
    weight_N = token_weights(kept)
    shards = []
    for rank in range(ranks):
        rows = np.arange(rank, len(keep), ranks)
        shards.append(
            Shard(
                prompt_NP=kept.prompt_NP[rows],
                answer_NA=kept.answer_NA[rows],
                mask_NA=kept.mask_NA[rows],
                logprob_NA=kept.logprob_NA[rows],
                advantage_N=advantage_N[keep][rows].astype(np.float32),
                weight_N=weight_N[rows],
            )
        )
    return shards


def token_weights(batch: RolloutBatch) -> np.ndarray:
    """1 / (trajectories * samples of the trajectory * tokens of the sample), float32."""
    trajectory_N = batch.game_N.astype(np.int64) * 64 + batch.seat_N
    _, index_N, count = np.unique(trajectory_N, return_inverse=True, return_counts=True)
    tokens_N = np.maximum(batch.mask_NA.sum(1), 1)
    return (1.0 / (len(count) * count[index_N] * tokens_N)).astype(np.float32)


def surrogate(
    logprob_NA: torch.Tensor,
    old_NA: torch.Tensor,
    reference_NA: torch.Tensor,
    mask_NA: torch.Tensor,
    advantage_N: torch.Tensor,
    weight_N: torch.Tensor,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of a shard (a sum with the given weights) and statistics of its tokens, as weighted sums."""
    ratio_NA = (logprob_NA - old_NA).exp()
    advantage_N1 = advantage_N.unsqueeze(1)
    clipped_NA = ratio_NA.clamp(1 - config.clip, 1 + config.clip)
    gain_NA = torch.minimum(ratio_NA * advantage_N1, clipped_NA * advantage_N1)
    bounded_NA = torch.maximum(gain_NA, config.dual_clip * advantage_N1)
    gain_NA = torch.where(advantage_N1 < 0, bounded_NA, gain_NA)
    gap_NA = reference_NA - logprob_NA
    kl_NA = gap_NA.exp() - gap_NA - 1
    weight_NA = weight_N.unsqueeze(1) * mask_NA
    loss = (weight_NA * (config.kl_weight * kl_NA - gain_NA)).sum()
    with torch.no_grad():
        outside_NA = ((ratio_NA - 1).abs() > config.clip).float()
        statistics = {
            "loss": float(loss.detach()),
            "kl": float((weight_NA * kl_NA).sum()),
            "clip_fraction": float((weight_NA * outside_NA).sum()),
            "entropy": float((weight_NA * -logprob_NA).sum()),
        }
    return loss, statistics
