"""Advantage estimators: Strat-Reasoner's hybrid and its rivals, on the same rollouts. One function each, one registry.

Every estimator maps a batch and the scores of its samples to one advantage per sample; NaN marks samples that do not
enter the loss. All statistics are over the whole batch, so they are computed before it is cut into shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strat_reasoner.config import AdvantageConfig
from strat_reasoner.rollout import RolloutBatch


@dataclass
class Memory:
    """What an estimator carries from step to step (SPIRAL's baselines); saved with a checkpoint."""

    baselines: dict[str, float] = field(default_factory=dict)


Estimator = Callable[[RolloutBatch, np.ndarray, AdvantageConfig, Memory], np.ndarray]
SPIRAL_DECAY = 0.95


def strat_reasoner(batch: RolloutBatch, score_N: np.ndarray, config: AdvantageConfig, memory: Memory) -> np.ndarray:
    """A = A_return + w A_cot (arXiv 2605.04906).

    A_return = R_t - mean of R over the played turns of the same seat (no division by the spread);
    A_cot = (S - mean) / std over the M micro-rollouts of the state, 0 for ties. The unplayed ones have no return.
    """
    cot_N = config.cot_weight * cot_advantage(batch, score_N, config.std_floor)
    played_N = batch.sample_N == 0
    unplayed = cot_N if config.micro_in_loss else np.full(len(batch), np.nan)
    return np.where(played_N, return_advantage(batch) + cot_N, unplayed)


def marshal(batch: RolloutBatch, score_N: np.ndarray, config: AdvantageConfig, memory: Memory) -> np.ndarray:
    """MARSHAL: turn-level reward-to-go, centred per seat; Strat-Reasoner with w = 0."""
    return np.where(batch.sample_N == 0, return_advantage(batch), np.nan)


def grpo(batch: RolloutBatch, score_N: np.ndarray, config: AdvantageConfig, memory: Memory) -> np.ndarray:
    """GRPO on the outcome: one group per seat (all games start alike), A = (R - mean) / std of the game's return.

    Every turn of a player gets the same advantage: there is no credit for single turns.
    """
    outcome_N = outcome_of_game(batch)
    advantage_N = np.full(len(batch), np.nan)
    for seat in np.unique(batch.seat_N):
        rows = np.flatnonzero((batch.sample_N == 0) & (batch.seat_N == seat))
        _, first = np.unique(batch.game_N[rows], return_index=True)  # a game counts once, however many turns it has
        per_game = outcome_N[rows[first]]
        spread = per_game.std()
        centred = outcome_N[rows] - per_game.mean()
        advantage_N[rows] = centred / spread if spread > config.std_floor else 0.0
    return advantage_N


def spiral(batch: RolloutBatch, score_N: np.ndarray, config: AdvantageConfig, memory: Memory) -> np.ndarray:
    """SPIRAL: A = R - b[seat], b an exponential average (0.95) of the game's return, read before it is updated."""
    outcome_N = outcome_of_game(batch)
    advantage_N = np.full(len(batch), np.nan)
    for seat in np.unique(batch.seat_N):
        rows = np.flatnonzero((batch.sample_N == 0) & (batch.seat_N == seat))
        _, first = np.unique(batch.game_N[rows], return_index=True)
        key = f"seat{int(seat)}"
        baseline = memory.baselines.get(key, 0.0)
        advantage_N[rows] = outcome_N[rows] - baseline
        memory.baselines[key] = SPIRAL_DECAY * baseline + (1 - SPIRAL_DECAY) * float(outcome_N[rows[first]].mean())
    return advantage_N


def gigpo(batch: RolloutBatch, score_N: np.ndarray, config: AdvantageConfig, memory: Memory) -> np.ndarray:
    """GiGPO: A = A_episode + A_step; the step groups are the turns at one information state, singletons get 0."""
    episode_N = grpo(batch, score_N, config, memory)
    step_N = np.zeros(len(batch))
    played_N = batch.sample_N == 0
    for infoset in np.unique(batch.infoset_N):
        rows = np.flatnonzero(played_N & (batch.infoset_N == infoset))
        spread = batch.return_N[rows].std()
        if len(rows) > 1 and spread > config.std_floor:
            step_N[rows] = (batch.return_N[rows] - batch.return_N[rows].mean()) / spread
    return episode_N + step_N


ESTIMATORS: dict[str, Estimator] = {
    "strat_reasoner": strat_reasoner,
    "marshal": marshal,
    "grpo": grpo,
    "spiral": spiral,
    "gigpo": gigpo,
}


# -- parts ---------------------------------------------------------------------------------------------------------


def return_advantage(batch: RolloutBatch) -> np.ndarray:
    """R_t minus the mean of R over the played turns of the same seat; 0 for unplayed samples."""
    advantage_N = np.zeros(len(batch))
    for seat in np.unique(batch.seat_N):
        rows = (batch.sample_N == 0) & (batch.seat_N == seat)
        advantage_N[rows] = batch.return_N[rows] - batch.return_N[rows].mean(dtype=np.float64)
    return advantage_N


def cot_advantage(batch: RolloutBatch, score_N: np.ndarray, std_floor: float) -> np.ndarray:
    """(S - mean) / std over the micro-rollouts of each state; 0 where they differ by less than `std_floor`."""
    micro = int(batch.sample_N.max()) + 1
    group_GM = score_N.reshape(-1, micro)
    spread_G1 = group_GM.std(axis=1, keepdims=True)
    centred_GM = group_GM - group_GM.mean(axis=1, keepdims=True)
    return np.where(spread_G1 > std_floor, centred_GM / np.maximum(spread_G1, std_floor), 0.0).reshape(-1)


def outcome_of_game(batch: RolloutBatch) -> np.ndarray:
    """The whole game's return of the sample's player: the reward-to-go of its first turn."""
    first: dict[tuple[int, int], tuple[int, float]] = {}
    played = np.flatnonzero(batch.sample_N == 0)
    for row in played:
        key = (int(batch.game_N[row]), int(batch.seat_N[row]))
        if key not in first or batch.turn_N[row] < first[key][0]:
            first[key] = (int(batch.turn_N[row]), float(batch.return_N[row]))
    return np.array([first[int(g), int(s)][1] for g, s in zip(batch.game_N, batch.seat_N, strict=True)])
