"""Candidates that do not divide their model, job or cluster are refused with one clear error."""

from __future__ import annotations

import numpy as np
import pytest

from common.config import ConfigError
from scale_across.model import gpt
from scale_across.model_presets import load_model
from scale_across.parallelism import FIELDS, Parallelism, candidates, check, from_mapping

MODEL = gpt(12, 768, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "tp is 0; it must be a whole number of at least 1"),
        ({"microbatch": -1}, "microbatch is -1; it must be"),
        ({"zero": 4}, "zero is 4; it can be 0, 1, 2, 3"),
        ({"recompute": 7}, "recompute is 7; it can be 0, 1, 2"),
        ({"dp": 32}, r"tp x cp x pp x dp = 1 x 1 x 1 x 32 = 32, but the cluster has 16 GPUs; dp 16 would fill it"),
        ({"tp": 5}, "tp is 5, which does not divide 12 attention heads; it can be 1, 2, 3, 4, 6, 12"),
        ({"pp": 5}, r"pp x chunks = 5 x 1 divides neither 12 layers nor 14 .* for pp 5: none, change pp"),
        ({"pp": 2, "chunks": 4}, r"divides neither 12 layers nor 14 .* chunks for pp 2: 1, 2, 3, 6, 7"),
        ({"pp": 2, "chunks": 9}, r"pp x chunks = 2 x 9 stages for 12 layers; at most 14"),
        ({"cp": 3, "dp": 1}, "cp is 3, which does not divide 2048 tokens of a sequence"),
        ({"dp": 3}, r"dp x microbatch = 3 x 1 does not divide the global batch of 64 sequences; change dp"),
        ({"dp": 4, "microbatch": 3}, r"4 x 3 does not divide .*; microbatch can be 1, 2, 4, 8, 16"),
        ({"chunks": 2}, r"chunks 2: interleaving needs pp of at least 2"),
        ({"ep": 2}, "ep is 2, but gpt-12x768 has no experts; ep must be 1"),
        ({"dp": 8, "shard": 3}, "shard 3 does not divide dp x cp = 8"),
    ],
)
def test_one_error_names_key_value_and_what_is_valid(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Parallelism()._replace(**change), MODEL, gpus=16, global_batch=64, seq_len=2048)


def test_experts_must_divide() -> None:
    mixtral = load_model("mixtral-8x7b")
    good = Parallelism(tp=4, dp=8, ep=8, etp=4)
    check(good, mixtral, gpus=32, global_batch=64, seq_len=4096)
    for change, message in (
        ({"ep": 3}, "ep is 3, which does not divide 8 experts"),
        ({"etp": 3}, r"etp is 3, which does not divide 4 tensor ranks"),
        ({"ep": 8, "dp": 2}, r"ep is 8, which does not divide 2 ranks over which experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(good._replace(**change), mixtral, gpus=32, global_batch=64, seq_len=4096)


def test_the_stages_of_published_runs_are_accepted() -> None:
    llama = load_model("llama-3.1-405b")
    check(Parallelism(tp=8, pp=16, dp=64, chunks=8), llama, gpus=8192, global_batch=2048, seq_len=8192)


def test_candidates_broadcast_and_refuse_unknown_columns() -> None:
    plans_NF = candidates(tp=[1, 2], pp=np.array([[1], [4]]))
    assert plans_NF.shape == (4, len(FIELDS))
    assert plans_NF[3, FIELDS.index("tp")] == 2
    assert plans_NF[3, FIELDS.index("pp")] == 4
    assert (plans_NF[:, FIELDS.index("dp")] == 1).all()
    with pytest.raises(ConfigError, match="unknown column 'dq'; columns are tp, cp"):
        candidates(dq=[1])


def test_words_become_numbers() -> None:
    assert from_mapping({"recompute": "full", "order": "dp"}) == Parallelism(recompute=2, order=1)
    with pytest.raises(ConfigError, match="recompute is 'some'; it can be none, selective, full"):
        from_mapping({"recompute": "some"})
