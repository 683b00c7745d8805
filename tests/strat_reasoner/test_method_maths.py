"""Scores, advantages, weights and loss against values worked by hand, to 1e-6."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from strat_reasoner.advantage import Memory, cot_advantage, gigpo, grpo, marshal, spiral, strat_reasoner
from strat_reasoner.comparison import compare
from strat_reasoner.config import AdvantageConfig, ObjectiveConfig
from strat_reasoner.objective import make_shards, surrogate, token_weights
from strat_reasoner.rollout import RolloutBatch

APPROX = {"abs": 1e-6}


def batch_of(rows: list[dict[str, Any]]) -> RolloutBatch:
    """A batch from one dict per sample; what a test does not name gets a neutral value."""
    n = len(rows)

    def column(name: str, default: Any, dtype: Any = None) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype=dtype)

    tokens = column("tokens", 4)
    return RolloutBatch(
        prompt_NP=np.zeros((n, 2), np.int32),
        answer_NA=np.zeros((n, 4), np.int32),
        mask_NA=np.arange(4)[None, :] < tokens[:, None],
        logprob_NA=np.zeros((n, 4), np.float32),
        game_N=column("game", 0),
        turn_N=column("turn", 0),
        seat_N=column("seat", 0),
        sample_N=column("sample", 0),
        well_formed_N=column("ok", True),
        legal_N=column("ok", True),
        reward_N=column("reward", 0.0, np.float32),
        return_N=column("ret", 0.0, np.float32),
        infoset_N=column("infoset", "x"),
        field_N5=np.array([row.get("fields", ("",) * 5) for row in rows]),
        action_N=column("action", ""),
    )


# fields: OpponentIntent, OpponentPrediction, MyIntent, MyAction, MyPrediction
GAME = batch_of(
    [
        {"turn": 0, "seat": 0, "fields": ("none", "none", "bluff", "bet", "pass"), "action": "bet"},
        {"turn": 0, "seat": 0, "sample": 1, "fields": ("none", "none", "wait", "pass", "bet"), "action": "pass"},
        {"turn": 1, "seat": 1, "fields": ("bluff", "bet", "catch", "bet", "end"), "action": "bet"},
        {"turn": 1, "seat": 1, "sample": 1, "fields": ("value", "pass", "fold", "pass", "end"), "action": "pass"},
    ]
)


def test_scores_compare_with_the_opponents_played_turn() -> None:
    scores = compare(GAME)
    # first turn: no t-1; prediction "pass" against the played answer "bet" is wrong, the micro-rollout's "bet" right
    np.testing.assert_array_equal(scores.past_N, [np.nan, np.nan, 1, 0])  # "bluff" was what the other meant
    np.testing.assert_array_equal(scores.recursive_N, [np.nan, np.nan, 0, 1])  # it had predicted "pass"
    np.testing.assert_array_equal(scores.future_N, [0, 1, np.nan, np.nan])  # nothing follows turn 1
    np.testing.assert_allclose(scores.total_N, [0, 1, 0.5, 0.5])
    assert scores.means() == {"a": 0.5, "b": 0.5, "c": 0.5, "total": 0.5}


def test_a_field_that_could_not_be_parsed_scores_zero_even_against_an_empty_one() -> None:
    empty = batch_of([{"turn": 0, "seat": 0}, {"turn": 1, "seat": 1}])
    np.testing.assert_array_equal(compare(empty).total_N, [0, 0])


def test_cot_advantage_standardises_within_the_state_and_ties_give_zero() -> None:
    batch = batch_of([{"turn": t, "sample": s} for t in range(2) for s in range(3)])
    scores = np.array([0.0, 0.5, 1.0, 0.3, 0.3, 0.3])
    spread = math.sqrt(1 / 6)
    expected = [-0.5 / spread, 0, 0.5 / spread, 0, 0, 0]
    assert cot_advantage(batch, scores, 1e-3) == pytest.approx(expected, **APPROX)


PLAYED = batch_of(
    [
        {"game": 0, "turn": 0, "seat": 0, "ret": 1.0, "infoset": "a"},
        {"game": 0, "turn": 1, "seat": 1, "ret": -1.0, "infoset": "c"},
        {"game": 0, "turn": 2, "seat": 0, "ret": 0.8, "infoset": "b"},
        {"game": 1, "turn": 0, "seat": 0, "ret": -2.0, "infoset": "a"},
        {"game": 1, "turn": 1, "seat": 1, "ret": 2.0, "infoset": "d"},
    ]
)
NO_SCORES = np.zeros(5)


def test_marshal_centres_the_reward_to_go_per_seat() -> None:
    mean = (1.0 + 0.8 - 2.0) / 3
    expected = [1 - mean, -1.5, 0.8 - mean, -2 - mean, 1.5]
    assert marshal(PLAYED, NO_SCORES, AdvantageConfig(), Memory()) == pytest.approx(expected, **APPROX)


def test_the_hybrid_adds_w_times_the_cot_advantage_to_the_played_sample() -> None:
    batch = batch_of(
        [
            {"game": 0, "ret": 1.0},
            {"game": 0, "sample": 1},
            {"game": 1, "ret": -1.0},
            {"game": 1, "sample": 1},
        ]
    )
    scores = np.array([1.0, 0.0, 0.5, 0.5])
    played_only = strat_reasoner(batch, scores, AdvantageConfig(cot_weight=0.2), Memory())
    assert played_only == pytest.approx([1.2, np.nan, -1.0, np.nan], nan_ok=True, **APPROX)
    both = strat_reasoner(batch, scores, AdvantageConfig(cot_weight=0.2, micro_in_loss=True), Memory())
    assert both == pytest.approx([1.2, -0.2, -1.0, 0.0], **APPROX)
    without = strat_reasoner(batch, scores, AdvantageConfig(cot_weight=0), Memory())
    assert without == pytest.approx(marshal(batch, scores, AdvantageConfig(), Memory()), nan_ok=True, **APPROX)


def test_grpo_gives_every_turn_of_a_game_its_standardised_outcome() -> None:
    """Seat 0's games returned 1 and -2: mean -0.5, spread 1.5. A game counts once, however many turns it has."""
    advantage = grpo(PLAYED, NO_SCORES, AdvantageConfig(), Memory())
    assert advantage == pytest.approx([1, -1, 1, -1, 1], **APPROX)


def test_gigpo_adds_step_groups_of_equal_states() -> None:
    """State a: returns 1 and -2, so +1 and -1; b, c and d are singletons and add nothing."""
    advantage = gigpo(PLAYED, NO_SCORES, AdvantageConfig(), Memory())
    assert advantage == pytest.approx([2, -1, 1, -2, 1], **APPROX)


def test_spiral_reads_its_baseline_before_it_updates_it() -> None:
    memory = Memory({"seat0": 1.0})
    advantage = spiral(PLAYED, NO_SCORES, AdvantageConfig(), memory)
    assert advantage == pytest.approx([0, -1, 0, -3, 2], **APPROX)
    assert memory.baselines == pytest.approx({"seat0": 0.95 - 0.05 * 0.5, "seat1": 0.05 * 0.5}, **APPROX)


def test_token_weights_average_over_trajectories_then_turns_then_tokens() -> None:
    batch = batch_of(
        [
            {"game": 0, "seat": 0, "turn": 0, "tokens": 4},
            {"game": 0, "seat": 0, "turn": 2, "tokens": 2},
            {"game": 0, "seat": 1, "turn": 1, "tokens": 1},
        ]
    )
    weights = token_weights(batch)
    assert weights == pytest.approx([1 / (2 * 2 * 4), 1 / (2 * 2 * 2), 1 / (2 * 1 * 1)], **APPROX)
    assert (weights * batch.mask_NA.sum(1)).sum() == pytest.approx(1, **APPROX)


def test_shards_together_hold_every_sample_with_an_advantage_once() -> None:
    advantage = np.array([1.0, np.nan, 3.0, 4.0, 5.0])
    shards = make_shards(PLAYED, advantage, 2)
    assert sorted(a for shard in shards for a in shard.advantage_N.tolist()) == [1, 3, 4, 5]
    total = sum((shard.weight_N * shard.mask_NA.sum(1)).sum() for shard in shards)
    assert total == pytest.approx(1, **APPROX)


def loss_of(
    ratio: float, advantage: float, reference_gap: float = 0.0, **config: float
) -> tuple[float, dict[str, float]]:
    """Loss of one token with the given probability ratio, advantage and log pi_ref - log pi."""
    logprob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, statistics = surrogate(
        logprob,
        torch.zeros(1, 1),
        logprob.detach() + reference_gap,
        torch.ones(1, 1),
        torch.tensor([advantage]),
        torch.ones(1),
        ObjectiveConfig(**{"kl_weight": 0.0, **config}),  # type: ignore[arg-type]
    )
    return float(loss.detach()), statistics


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
        (9.0, -2.0, 6.0),  # dual clip at 3
    ],
)
def test_the_surrogate_clips_on_both_sides_and_twice_for_bad_actions(
    ratio: float, advantage: float, expected: float
) -> None:
    assert loss_of(ratio, advantage)[0] == pytest.approx(expected, **APPROX)


def test_the_penalty_is_the_k3_estimator() -> None:
    loss, statistics = loss_of(1.0, 0.0, reference_gap=0.5, kl_weight=0.1)
    assert statistics["kl"] == pytest.approx(math.exp(0.5) - 1.5, **APPROX)
    assert loss == pytest.approx(0.1 * (math.exp(0.5) - 1.5), **APPROX)
