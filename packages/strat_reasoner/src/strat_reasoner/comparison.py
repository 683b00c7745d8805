"""Centralised comparison of chains of thought: how well each player's words about the other match the other's own.

| score | what this player wrote at turn t | compared with |
|---|---|---|
| a, past | OpponentIntent | the opponent's MyIntent at t-1 |
| b, recursive | OpponentPrediction | the opponent's MyPrediction at t-1 |
| c, future | MyPrediction | the opponent's action at t+1 |

After Strat-Reasoner (arXiv 2605.04906): each score lies in [0, 1] and S is their mean. The first turn has no t-1 and
the last no t+1, so the mean is over the pairs that exist. A field that could not be parsed scores 0. Every
micro-rollout is compared with the opponent's *played* turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strat_reasoner.rollout import RolloutBatch

OPPONENT_INTENT, OPPONENT_PREDICTION, MY_INTENT, MY_ACTION, MY_PREDICTION = range(5)
"""Columns of `RolloutBatch.field_N5`."""

Judge = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(statements, references), arrays of words → scores in [0, 1]."""


def exact_judge(statement_N: np.ndarray, reference_N: np.ndarray) -> np.ndarray:
    """1 where the words are equal and not empty, else 0."""
    return ((statement_N == reference_N) & (statement_N != "")).astype(np.float64)


JUDGES: dict[str, Judge] = {"exact": exact_judge}


@dataclass(frozen=True)
class Scores:
    """Scores per sample; NaN where the pair does not exist. `total_N` is the mean of those that exist, else 0."""

    past_N: np.ndarray
    recursive_N: np.ndarray
    future_N: np.ndarray
    total_N: np.ndarray

    def means(self) -> dict[str, float]:
        """Mean a, b, c and S over the samples that have them."""
        named = {"a": self.past_N, "b": self.recursive_N, "c": self.future_N}
        values = {name: float(np.nanmean(v)) if np.isfinite(v).any() else 0.0 for name, v in named.items()}
        return values | {"total": float(self.total_N.mean())}


def compare(batch: RolloutBatch, judge: Judge = exact_judge) -> Scores:
    """Score every sample of a batch against the other player's played turns."""
    before_N, after_N = neighbours(batch)
    fields = batch.field_N5
    past_N = _judge_pairs(judge, fields[:, OPPONENT_INTENT], fields[:, MY_INTENT], before_N)
    recursive_N = _judge_pairs(judge, fields[:, OPPONENT_PREDICTION], fields[:, MY_PREDICTION], before_N)
    future_N = _judge_pairs(judge, fields[:, MY_PREDICTION], batch.action_N, after_N)
    stacked_3N = np.stack([past_N, recursive_N, future_N])
    exists_3N = np.isfinite(stacked_3N)
    total_N = np.where(exists_3N, stacked_3N, 0).sum(0) / np.maximum(exists_3N.sum(0), 1)
    return Scores(past_N, recursive_N, future_N, total_N)


def _judge_pairs(judge: Judge, statement_N: np.ndarray, source_N: np.ndarray, partner_N: np.ndarray) -> np.ndarray:
    scores_N = np.full(len(statement_N), np.nan)
    exists_N = partner_N >= 0
    scores_N[exists_N] = judge(statement_N[exists_N], source_N[partner_N[exists_N]])
    return scores_N


def neighbours(batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """For each sample the row of another seat's nearest played turn before it, and after it; -1 where there is none."""
    played = [(int(g), int(t), int(s), row) for row, (g, t, s, m) in enumerate(_places(batch)) if m == 0]
    games: dict[int, list[tuple[int, int, int]]] = {}
    for game, turn, seat, row in sorted(played):
        games.setdefault(game, []).append((turn, seat, row))
    before_N = np.full(len(batch), -1)
    after_N = np.full(len(batch), -1)
    for row, (game, turn, seat, _) in enumerate(_places(batch)):
        for other_turn, other_seat, other_row in games[int(game)]:
            if other_seat == seat:
                continue
            if other_turn < turn:
                before_N[row] = other_row
            elif other_turn > turn:
                after_N[row] = other_row
                break
    return before_N, after_N


def _places(batch: RolloutBatch) -> zip[tuple[int, int, int, int]]:
    return zip(batch.game_N, batch.turn_N, batch.seat_N, batch.sample_N, strict=True)
