"""Self-play in batches: all games of a worker move together, and every state is sampled M times.

The first of the M micro-rollouts is played; the others only show what else the policy would have written there, and
never branch the game. Token ids are kept as drawn, from here to the objective; nothing is ever tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from strat_reasoner.config import RolloutConfig, TrainConfig
from strat_reasoner.games import Decision, Game, decision, get_game, load
from strat_reasoner.generate import Sampler
from strat_reasoner.policy import build_model, numpy_rng, pad_prompts, torch_rng, unflatten
from strat_reasoner.reasoning import Parsed, parse
from strat_reasoner.vocabulary import MAX_PROMPT_EXTRA, Vocabulary

MAX_FACTS = 12
"""Longest `Decision.facts`, in words; with it all prompts of a run are padded to one length."""


@dataclass(frozen=True)
class RolloutBatch:
    """N samples of games in the order of play: N = turns x M, the M samples of a turn stand together.

    Arrays of one row per sample; `game`, `turn` and `seat` say where it belongs, `sample` is 0 for the played one.
    """

    prompt_NP: np.ndarray
    answer_NA: np.ndarray
    mask_NA: np.ndarray
    logprob_NA: np.ndarray
    """Log-probabilities as drawn."""
    game_N: np.ndarray
    turn_N: np.ndarray
    seat_N: np.ndarray
    sample_N: np.ndarray
    well_formed_N: np.ndarray
    legal_N: np.ndarray
    reward_N: np.ndarray
    """Reward of the turn itself: format bonus, penalty of an invalid answer; zero for unplayed samples."""
    return_N: np.ndarray
    """Reward-to-go of the turn's player: this and later turns' rewards, and the game's outcome. Played samples only."""
    infoset_N: np.ndarray
    """Information-state strings."""
    field_N5: np.ndarray
    """The five fields of the reasoning as words; empty strings where the answer does not hold them."""
    action_N: np.ndarray
    """The word of the chosen move, empty if none."""

    def __len__(self) -> int:
        return len(self.game_N)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what travels to the comparison."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return int(self.mask_NA.sum())

    def rows(self, index: np.ndarray) -> RolloutBatch:
        """The samples at `index` (boolean mask or positions)."""
        return RolloutBatch(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @staticmethod
    def concatenate(batches: list[RolloutBatch]) -> RolloutBatch:
        """One batch of several workers' games; games are renumbered, so that they stay apart."""
        joined: dict[str, Any] = {
            field.name: np.concatenate([getattr(batch, field.name) for batch in batches])
            for field in fields(RolloutBatch)
        }
        offsets = np.cumsum([0, *(int(batch.game_N.max()) + 1 for batch in batches[:-1])])
        joined["game_N"] = np.concatenate([b.game_N + offset for b, offset in zip(batches, offsets, strict=True)])
        return RolloutBatch(**joined)


@dataclass
class _Turn:
    """One played turn with its samples; rewards are filled in when the game is over."""

    game: int
    turn: int
    decision: Decision
    first_row: int
    parsed: list[Parsed]
    reward: float = 0.0
    return_to_go: float = 0.0


class RolloutWorker:
    """Plays games with the current policy in every seat.

    Args:
        config: the run's configuration.
        rank: this worker's place among `world` rollout workers; decides its random streams.
    """

    def __init__(self, config: TrainConfig, rank: int = 0, world: int = 1) -> None:
        torch.set_num_threads(1)
        self.config, self.rank, self.world = config, rank, world
        self.game: Game = get_game(config.game)
        self.vocabulary = Vocabulary.for_games([config.game])
        self.model = build_model(config.model, self.vocabulary, config.seed)
        self.sampler = Sampler(self.model, self.vocabulary.pad, self.vocabulary.eos)

    def load_weights(self, flat: torch.Tensor) -> None:
        """Take over the learner's weights."""
        unflatten(self.model, flat)
        self.sampler.refresh()

    def games_of_step(self) -> int:
        """This worker's share of `games_per_step`."""
        total = self.config.rollout.games_per_step
        return total * (self.rank + 1) // self.world - total * self.rank // self.world

    def collect(self, step: int) -> RolloutBatch:
        """Play this worker's games of `step`. The same seed, rank, step and weights give the same batch."""
        rng = numpy_rng(self.config.seed, "chance", self.rank, step)
        generator = torch_rng(self.config.seed, "rollout", self.rank, step)
        return _Table(self, self.games_of_step(), rng, generator).play()

    def transcripts(self, games: int, seed: int) -> list[str]:
        """Some self-play games as text: one block per game, one line per turn with all that was written."""
        table = _Table(self, games, numpy_rng(seed, "transcript chance"), torch_rng(seed, "transcript"))
        batch = table.play()
        blocks = []
        for game in range(games):
            lines = []
            for row in np.flatnonzero((batch.game_N == game) & (batch.sample_N == 0)):
                text = " ".join(self.vocabulary.decode(batch.answer_NA[row].tolist()))
                lines.append(f"player {batch.seat_N[row]}: {text}")
            outcome = "cut short" if game in table.loser else f"returns {table.states[game].returns()}"
            blocks.append("\n".join([*lines, outcome]))
        return blocks


class _Table:
    """The games of one `collect` call while they are being played."""

    def __init__(self, worker: RolloutWorker, games: int, rng: np.random.Generator, generator: torch.Generator) -> None:
        self.worker, self.rng, self.generator = worker, rng, generator
        self.rules: RolloutConfig = worker.config.rollout
        spiel = load(worker.game)
        self.states = [spiel.new_initial_state() for _ in range(games)]
        self.turns: list[list[_Turn]] = [[] for _ in range(games)]
        self.loser: dict[int, int] = {}  # game -> seat that answered with no legal move
        self.pieces: list[tuple[torch.Tensor, ...]] = []
        self.samples = 0

    def play(self) -> RolloutBatch:
        """Move all games until they are over, then settle rewards."""
        while True:
            moving = []
            for index, state in enumerate(self.states):
                advance_chance(state, self.rng)
                if not state.is_terminal() and index not in self.loser:
                    moving.append(index)
            if not moving:
                break
            self._move(moving)
        for index, turns in enumerate(self.turns):
            self._settle(index, turns)
        return self._batch()

    def _move(self, moving: list[int]) -> None:
        """Sample M answers for each game in `moving`, and play the first."""
        m = self.rules.micro_rollouts
        vocabulary = self.worker.vocabulary
        decisions = [decision(self.worker.game, self.states[index]) for index in moving]
        prompts = [vocabulary.prompt(d) for d in decisions for _ in range(m)]
        prompt_BP = pad_prompts(prompts, vocabulary.pad)
        drawn = self.worker.sampler.sample(
            prompt_BP,
            self.rules.max_answer_tokens,
            self.generator,
            self.rules.temperature,
            self.rules.top_k,
            self.rules.top_p,
        )
        self.pieces.append((_left_pad(prompt_BP, vocabulary.pad), drawn.ids_BA, drawn.mask_BA, drawn.logprob_BA))
        for position, (index, seen) in enumerate(zip(moving, decisions, strict=True)):
            rows = range(position * m, (position + 1) * m)
            parsed = [parse_answer(vocabulary, drawn.ids_BA[row].tolist()) for row in rows]
            turn = _Turn(index, len(self.turns[index]), seen, self.samples + position * m, parsed)
            self.turns[index].append(turn)
            action = chosen_action(parsed[0], seen)
            if action is None:
                turn.reward = self.rules.invalid_reward
                self.loser[index] = seen.seat
            else:
                turn.reward = self.rules.format_reward
                self.states[index].apply_action(action)
        self.samples += len(prompts)

    def _settle(self, index: int, turns: list[_Turn]) -> None:
        """Reward-to-go per turn: its own and the same seat's later turns' rewards, and the outcome of the game."""
        outcome = [0.0] * self.states[index].num_players()
        if index not in self.loser:  # a game that was cut short pays nobody but the penalty
            outcome = list(self.states[index].returns())
        to_go = dict(enumerate(outcome))
        for turn in reversed(turns):
            to_go[turn.decision.seat] += turn.reward
            turn.return_to_go = to_go[turn.decision.seat]

    def _batch(self) -> RolloutBatch:
        prompt, answer, mask, logprob = (torch.cat(column).numpy() for column in zip(*self.pieces, strict=True))
        turns = sorted((turn for game in self.turns for turn in game), key=lambda turn: turn.first_row)
        m = self.rules.micro_rollouts
        each = [(turn, s) for turn in turns for s in range(m)]
        return RolloutBatch(
            prompt_NP=prompt.astype(np.int32),
            answer_NA=answer.astype(np.int32),
            mask_NA=mask.astype(bool),
            logprob_NA=logprob,
            game_N=np.array([turn.game for turn, _ in each], dtype=np.int32),
            turn_N=np.array([turn.turn for turn, _ in each], dtype=np.int16),
            seat_N=np.array([turn.decision.seat for turn, _ in each], dtype=np.int8),
            sample_N=np.array([s for _, s in each], dtype=np.int16),
            well_formed_N=np.array([turn.parsed[s].well_formed for turn, s in each]),
            legal_N=np.array([chosen_action(turn.parsed[s], turn.decision) is not None for turn, s in each]),
            reward_N=np.array([turn.reward if s == 0 else 0.0 for turn, s in each], dtype=np.float32),
            return_N=np.array([turn.return_to_go if s == 0 else 0.0 for turn, s in each], dtype=np.float32),
            infoset_N=np.array([turn.decision.infoset for turn, _ in each]),
            field_N5=np.array([_field_words(turn.parsed[s]) for turn, s in each]),
            action_N=np.array([turn.parsed[s].answer or "" for turn, s in each]),
        )


def advance_chance(state: Any, rng: np.random.Generator) -> None:
    """Let chance act until a player must, or the game is over."""
    while state.is_chance_node():
        actions, probabilities = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(int(actions[rng.choice(len(actions), p=probabilities)]))


def parse_answer(vocabulary: Vocabulary, ids: list[int]) -> Parsed:
    """Parse sampled ids; an answer without the end token (over-long) is malformed."""
    if vocabulary.eos not in ids:
        return Parsed(False, None, None)
    return parse(vocabulary.decode(ids))


def chosen_action(parsed: Parsed, seen: Decision) -> int | None:
    """The OpenSpiel action of a well-formed answer that names a legal move, else None."""
    if not parsed.well_formed or parsed.answer not in seen.words:
        return None
    return seen.legal[seen.words.index(parsed.answer)]


def _field_words(parsed: Parsed) -> tuple[str, ...]:
    r = parsed.reasoning
    if r is None:
        return ("",) * 5
    return (r.opponent_intent, r.opponent_prediction, r.my_intent, r.my_action, r.my_prediction)


def _left_pad(prompt_BP: torch.Tensor, pad: int) -> torch.Tensor:
    """Pad to the longest prompt that a run can have, so that batches of all turns and workers can be joined."""
    missing = MAX_FACTS + MAX_PROMPT_EXTRA - prompt_BP.shape[1]
    return torch.nn.functional.pad(prompt_BP, (missing, 0), value=pad)
