"""Everything that a training run can be told, with the defaults argued. Sections follow the modules that read them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from common.config import Config
from strat_reasoner.games import get_game


class ModelConfig(Config):
    """A Llama-architecture transformer made here. The default, `nano`, has about 1 M parameters.

    Two wide layers rather than many narrow ones: on a CPU each layer costs a fixed dispatch time per token.
    """

    preset: Literal["nano"] = "nano"
    hidden: int = Field(default=192, gt=0, le=4096)
    layers: int = Field(default=2, gt=0, le=64)
    heads: int = Field(default=6, gt=0)
    ffn: int = Field(default=640, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of 2 * heads ({2 * self.heads}): heads have an even width"
            )
        return self


class WarmstartConfig(Config):
    """Supervised traces from imperfect play, so that the base writes the format and plays moderately."""

    steps: int = Field(default=160, ge=0)
    batch_games: int = Field(default=32, gt=0)
    """Games per step; each gives a trace for every turn."""
    learning_rate: float = Field(default=3e-3, gt=0)
    equilibrium_share: float = Field(default=0.2, ge=0, le=1)
    """How much of the teacher is the equilibrium; the rest is uniform. Low, to leave something to learn."""
    intent_strength: float = Field(default=0.7, ge=0, le=1)
    """Probability that the action is the one that the stated intent names: makes the text causal for the action."""
    truth_share: float = Field(default=0.7, ge=0, le=1)
    """Probability that a statement about the opponent is what the opponent really wrote or did; else it is drawn from
    all. The truth of a played game is a sample of the posterior, so it tells the model no hidden card."""
    belief_logit: float = Field(default=1.7, ge=0)
    """How much `OppIntent: bluff` (or `value`) moves the log-odds of calling a bet (or folding)."""


class RolloutConfig(Config):
    """Self-play and micro-rollouts."""

    games_per_step: int = Field(default=128, gt=0)
    """Over all rollout workers."""
    micro_rollouts: int = Field(default=2, ge=1)
    """M of the paper: samples per state, of which the first is played. The paper uses 2."""
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0)
    """0: all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_answer_tokens: int = Field(default=32, gt=8, le=112)
    format_reward: float = 0.05
    """Per well-formed turn (the paper's value)."""
    invalid_reward: float = -2.0
    """For the turn that ends a game by a malformed or illegal answer. The paper's -10 is five times what a game of Kuhn
    can lose; centred over a batch it would drown everything else whenever one answer in a hundred fails."""


class ComparisonConfig(Config):
    """The centralised comparison of both players' reasoning."""

    judge: Literal["exact"] = "exact"


class AdvantageConfig(Config):
    """How rewards and scores become advantages; `estimator` is a name of `strat_reasoner.advantage.ESTIMATORS`."""

    estimator: str = "strat_reasoner"
    cot_weight: float = Field(default=0.2, ge=0)
    """w of the paper."""
    std_floor: float = Field(default=1e-3, gt=0)
    """A spread below this is a tie and gives no advantage, instead of one in the thousands."""
    micro_in_loss: bool = False
    """Whether the unplayed micro-rollouts enter the loss with w * A_cot alone. Off: they cost a second forward and
    backward pass for a signal that the played one carries too (the mean over the group is its baseline)."""

    @field_validator("estimator")
    @classmethod
    def _known(cls, value: str) -> str:
        from strat_reasoner.advantage import ESTIMATORS

        if value not in ESTIMATORS:
            raise ValueError(f"no such estimator; there are {', '.join(ESTIMATORS)}")
        return value


class ObjectiveConfig(Config):
    """The clipped surrogate."""

    clip: float = Field(default=0.2, gt=0)
    dual_clip: float = Field(default=3.0, gt=1)
    """Bounds the loss of a negative advantage at dual_clip * |A| (Ye et al. 2020)."""
    kl_weight: float = Field(default=0.1, ge=0)
    """To the warm start. The paper's 0.15 is for language models; a large one sets a floor on exploitability."""
    epochs: int = Field(default=1, gt=0)


class OptimizerConfig(Config):
    """AdamW."""

    learning_rate: float = Field(default=2e-4, gt=0)
    final_share: float = Field(default=0.1, ge=0, le=1)
    """Cosine decay to this share of the learning rate: self-play cycles unless the step shrinks."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    """The paper's 0.05 is on LoRA matrices; here it would pull the whole model away from its warm start."""
    grad_clip: float = Field(default=1.0, gt=0)


class TrainConfig(Config):
    """One training run."""

    game: str = "kuhn"
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=40, ge=0)
    model: ModelConfig = ModelConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    rollout: RolloutConfig = RolloutConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    @field_validator("game")
    @classmethod
    def _known(cls, value: str) -> str:
        return get_game(value).name
