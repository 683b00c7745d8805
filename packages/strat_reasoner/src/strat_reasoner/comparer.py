"""The comparison worker: sees all games of a step, so it scores both players' reasoning and computes all advantages."""

from __future__ import annotations

import numpy as np

from strat_reasoner.advantage import ESTIMATORS, Memory
from strat_reasoner.comparison import JUDGES, compare
from strat_reasoner.config import TrainConfig
from strat_reasoner.objective import Shard, make_shards
from strat_reasoner.rollout import RolloutBatch


class Comparer:
    """Scores, advantages, shards.

    Args:
        config: the run's configuration.
        learner_ranks: into how many shards a step is cut.
    """

    def __init__(self, config: TrainConfig, learner_ranks: int = 1) -> None:
        self.config, self.learner_ranks = config, learner_ranks
        self.judge = JUDGES[config.comparison.judge]
        self.estimator = ESTIMATORS[config.advantage.estimator]
        self.memory = Memory()

    def process(self, batches: list[RolloutBatch]) -> tuple[list[Shard], dict[str, float]]:
        """Shards for the learner ranks, in rank order, and statistics of the step."""
        batch = RolloutBatch.concatenate(batches)
        scores = compare(batch, self.judge)
        advantage_N = self.estimator(batch, scores.total_N, self.config.advantage, self.memory)
        return make_shards(batch, advantage_N, self.learner_ranks), statistics(batch, advantage_N) | {
            f"score/{name}": value for name, value in scores.means().items()
        }


def statistics(batch: RolloutBatch, advantage_N: np.ndarray) -> dict[str, float]:
    """What a person watches: format, length, returns, spread of the advantages."""
    played_N = batch.sample_N == 0
    values = {
        "rollout/games": float(len(np.unique(batch.game_N))),
        "rollout/turns": float(played_N.sum()),
        "rollout/tokens": float(batch.tokens),
        "rollout/answer_tokens": float(batch.mask_NA.sum(1).mean()),
        "rollout/malformed": float(1 - batch.well_formed_N.mean()),
        "rollout/illegal": float(1 - batch.legal_N.mean()),
        "advantage/std": float(np.nanstd(advantage_N)),
    }
    for seat in np.unique(batch.seat_N):
        rows = played_N & (batch.seat_N == seat)
        values[f"rollout/return_seat{int(seat)}"] = float(batch.return_N[rows].mean())
    return values
