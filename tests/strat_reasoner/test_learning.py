"""Model, sampler, rollouts and learner: agreement, determinism, exact resume, and that training improves play."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from common import checkpoint
from common.config import ConfigError
from strat_reasoner.cli import app, load, save
from strat_reasoner.comparer import Comparer
from strat_reasoner.config import ModelConfig, RolloutConfig, TrainConfig, WarmstartConfig
from strat_reasoner.evaluate import bootstrap_gain, estimate_table, exploitability
from strat_reasoner.generate import Sampler
from strat_reasoner.learner import Learner
from strat_reasoner.model_player import ModelPlayer
from strat_reasoner.objective import make_shards
from strat_reasoner.policy import answer_logprobs, build_model, flatten, pad_prompts, stream, torch_rng, unflatten
from strat_reasoner.rollout import RolloutBatch, RolloutWorker
from strat_reasoner.train import LocalRoles, train
from strat_reasoner.vocabulary import Vocabulary

TINY = ModelConfig(hidden=48, layers=2, heads=4, ffn=96)
VOCABULARY = Vocabulary.for_games(["kuhn"])


def config(**changes: object) -> TrainConfig:
    values = {
        "model": TINY,
        "steps": 6,
        "warmstart": WarmstartConfig(steps=60, batch_games=16, learning_rate=5e-3),
        "rollout": RolloutConfig(games_per_step=24),
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def warm() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """A briefly warm-started learner's state: writes the format most of the time."""
    learner = Learner(config())
    losses = learner.warm_start()
    assert losses[-1] < 0.5 * losses[0]
    return learner.state()


def warm_roles(cfg: TrainConfig, warm: tuple[dict[str, torch.Tensor], dict[str, object]]) -> LocalRoles:
    roles = LocalRoles(cfg)
    roles.learner.load_state(*warm)
    roles.sync_weights()
    return roles


def test_nano_has_about_a_million_parameters_and_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = (flatten(build_model(ModelConfig(), VOCABULARY, seed)) for seed in (0, 0, 1))
    assert 0.9e6 < first.numel() < 1.2e6
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_random_streams_differ_by_role_rank_and_step() -> None:
    keys = [("chance", 0, 0), ("chance", 0, 1), ("chance", 1, 0), ("rollout", 0, 0)]
    seeds = {stream(seed, *key) for seed in (0, 1) for key in keys}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 5, 1.0), (0.7, 100, 0.9)]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sampler_and_trainer_agree_on_log_probabilities(
    temperature: float, top_k: int, top_p: float, kv_heads: int
) -> None:
    """Prompts of unequal length, a random model (so that all tokens are likely), grouped-query attention too."""
    model = build_model(TINY, VOCABULARY, 3)
    if kv_heads != 4:
        from transformers import LlamaForCausalLM

        model.config.num_key_value_heads = kv_heads
        model = LlamaForCausalLM(model.config).eval()
    prompts = pad_prompts([[1, 7, 5], [1, 9, 12, 14, 3], [4, 4, 8, 1, 2, 6, 11]] * 5, VOCABULARY.pad)
    drawn = Sampler(model, VOCABULARY.pad, VOCABULARY.eos).sample(
        prompts, 20, torch_rng(0, "test"), temperature, top_k, top_p
    )
    with torch.no_grad():
        trained = answer_logprobs(model, prompts, drawn.ids_BA, drawn.mask_BA, VOCABULARY.pad, temperature)
    assert drawn.mask_BA.sum() > 100
    assert (trained - drawn.logprob_BA).abs().max() < 1e-4


def test_top_k_draws_only_the_most_likely_tokens() -> None:
    model = build_model(TINY, VOCABULARY, 3)
    prompts = torch.tensor([[1, 7, 5]] * 64)
    drawn = Sampler(model, VOCABULARY.pad, VOCABULARY.eos).sample(prompts, 1, torch_rng(0, "test"), 1.0, 3, 1.0)
    with torch.no_grad():
        best = set(model(prompts[:1]).logits[0, -1].topk(3).indices.tolist())
    assert set(drawn.ids_BA[:, 0].tolist()) == best


def test_flat_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="weights hold 3 parameters, the model has"):
        unflatten(build_model(TINY, VOCABULARY, 0), torch.zeros(3))


def test_rollouts_keep_the_ids_that_were_drawn(warm: tuple[dict[str, torch.Tensor], dict[str, object]]) -> None:
    """Retokenising the text must give back the same ids, and the recorded log-probabilities must be theirs."""
    roles = warm_roles(config(), warm)
    batch = roles.rollout.collect(0)
    assert batch.sample_N[: len(batch)].max() == 1
    with torch.no_grad():
        trained = answer_logprobs(
            roles.learner.model,
            torch.tensor(batch.prompt_NP).long(),
            torch.tensor(batch.answer_NA).long(),
            torch.tensor(batch.mask_NA).float(),
            VOCABULARY.pad,
        )
    assert np.abs(trained.numpy() - batch.logprob_NA).max() < 1e-4
    for row in np.flatnonzero(batch.well_formed_N):
        ids = batch.answer_NA[row][batch.mask_NA[row]].tolist()
        assert VOCABULARY.encode(VOCABULARY.decode(ids)) == ids[:-1]
        assert ids[-1] == VOCABULARY.eos


def test_kuhn_returns_are_zero_sum_and_rewards_to_go_add_up(
    warm: tuple[dict[str, torch.Tensor], dict[str, object]],
) -> None:
    batch = warm_roles(config(), warm).rollout.collect(1)
    bonus = RolloutConfig().format_reward
    for game in np.unique(batch.game_N):
        rows = np.flatnonzero((batch.game_N == game) & (batch.sample_N == 0))
        assert batch.turn_N[rows].tolist() == list(range(len(rows)))
        if batch.legal_N[rows].all():
            first = {int(batch.seat_N[row]): row for row in rows[::-1]}
            bonuses = {seat: bonus * (batch.seat_N[rows] == seat).sum() for seat in first}
            assert sum(batch.return_N[row] - bonuses[seat] for seat, row in first.items()) == pytest.approx(0, abs=1e-5)
        else:
            assert batch.return_N[rows[-1]] == pytest.approx(RolloutConfig().invalid_reward)


def test_two_ranks_on_shards_equal_one_rank_on_the_whole_batch(
    warm: tuple[dict[str, torch.Tensor], dict[str, object]],
) -> None:
    cfg = config()
    batch = warm_roles(cfg, warm).rollout.collect(0)
    advantage = np.where(batch.sample_N == 0, np.linspace(-1, 1, len(batch)), np.nan)
    whole = Learner(cfg)
    whole.load_state(*warm)
    whole.update(make_shards(batch, advantage, 1)[0])

    gradients: list[torch.Tensor] = []
    for rank, shard in enumerate(make_shards(batch, advantage, 2)):  # first pass: what each rank would contribute
        probe = Learner(cfg, rank, 2, lambda flat: gradients.append(flat.clone()))
        probe.load_state(*warm)
        probe.update(shard)
    mean = torch.stack(gradients).mean(0)

    def receive_mean(flat: torch.Tensor) -> None:
        flat.copy_(mean)

    half = Learner(cfg, 0, 2, receive_mean)
    half.load_state(*warm)
    half.update(make_shards(batch, advantage, 2)[0])
    assert (whole.flat_weights() - half.flat_weights()).abs().max() < 1e-5
    assert (whole.flat_weights() - warm[0]["policy"]).abs().max() > 1e-5


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(
    warm: tuple[dict[str, torch.Tensor], dict[str, object]],
) -> None:
    runs = [[r.metrics for r in train(warm_roles(config(seed=seed), warm), range(3))] for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    warm: tuple[dict[str, torch.Tensor], dict[str, object]], tmp_path: Path
) -> None:
    from strat_reasoner.config import AdvantageConfig

    cfg = config(advantage=AdvantageConfig(estimator="spiral"))  # it carries baselines from step to step
    through = warm_roles(cfg, warm)
    expected = [r.metrics for r in train(through, range(6))]
    stopped = warm_roles(cfg, warm)
    train(stopped, range(4))
    save(stopped, tmp_path, 4)
    resumed = LocalRoles(cfg)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    load(resumed, found)
    resumed.sync_weights()
    assert [r.metrics for r in train(resumed, range(4, 6))] == expected[4:]
    assert torch.equal(resumed.weights(), through.weights())


def test_batches_of_several_workers_are_joined_without_mixing_games(
    warm: tuple[dict[str, torch.Tensor], dict[str, object]],
) -> None:
    cfg = config()
    workers = [RolloutWorker(cfg, rank, 2) for rank in range(2)]
    for worker in workers:
        worker.load_weights(warm[0]["policy"])
    batches = [worker.collect(0) for worker in workers]
    joined = RolloutBatch.concatenate(batches)
    assert len(np.unique(joined.game_N)) == 24
    assert len(joined) == sum(map(len, batches))
    shards, statistics = Comparer(cfg, 2).process(batches)
    assert statistics["rollout/games"] == 24
    assert sum(map(len, shards)) == (joined.sample_N == 0).sum()


def test_training_lowers_exploitability_beyond_the_sampling_error() -> None:
    """A small model, a short run: the interval of the fall excludes zero."""
    cfg = config(
        steps=30,
        warmstart=WarmstartConfig(steps=150, batch_games=24, learning_rate=5e-3),
        rollout=RolloutConfig(games_per_step=96),
    )
    roles = LocalRoles(cfg)
    roles.learner.warm_start()
    roles.sync_weights()
    game = roles.rollout.game

    def table() -> object:
        player = ModelPlayer(roles.rollout.model, roles.rollout.vocabulary, cfg.rollout)
        return estimate_table(player, game, 96, np.random.default_rng(0))

    before = table()
    train(roles, range(cfg.steps))
    after = table()
    fall = bootstrap_gain(lambda t: -exploitability(game, t), before, after, np.random.default_rng(1), 200)  # type: ignore[arg-type]
    assert fall.low > 0


def test_the_command_trains_resumes_and_refuses_another_configuration(tmp_path: Path) -> None:
    small = [f"model.{k}={v}" for k, v in TINY.model_dump(exclude={"preset"}).items()]
    common = ["steps=2", "warmstart.steps=2", "rollout.games_per_step=4", *small]
    arguments = ["train", "--output", str(tmp_path), *(word for item in common for word in ("--set", item))]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000000", "step-000002"]
    assert CliRunner().invoke(app, arguments).exit_code == 0  # nothing left to do
    other = CliRunner().invoke(app, [*arguments, "--set", "seed=5"])
    assert isinstance(other.exception, ConfigError)
    assert "another configuration" in str(other.exception)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"game": "khun"}, "did you mean 'kuhn'"),
        ({"advantage": {"estimator": "ppo"}}, "there are strat_reasoner, marshal"),
        ({"model": {"hidden": 100, "heads": 6}}, "must be a multiple of 2 * heads"),
        ({"rollout": {"max_answer_tokens": 500}}, "rollout.max_answer_tokens"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature"),
        ({"rollout": {"temprature": 1}}, "did you mean 'temperature'"),
    ],
)
def test_bad_configurations_are_refused_with_the_way_out(override: dict[str, object], expected: str) -> None:
    from common.config import validate

    with pytest.raises(ConfigError) as error:
        validate(TrainConfig, override, "train.yaml")
    assert expected in str(error.value)
