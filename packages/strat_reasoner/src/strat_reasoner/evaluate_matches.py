"""Played games: batched over games, in a chosen seat, with the same chance events for every player of the same seed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strat_reasoner.evaluate_intervals import Interval, bootstrap_mean, wilson
from strat_reasoner.evaluate_tree import illegal_returns
from strat_reasoner.games import Decision, Game, Move, Player, advance_chance, decision, load
from strat_reasoner.opponents_search import Pool

CHUNK_GAMES = 100
"""Games that are played together. Random streams belong to a chunk, so workers may share chunks out in any way."""

OnTurn = Callable[[int, Decision, Move], None]
"""Called with the game's number, what the mover saw and its move."""


@dataclass(frozen=True)
class MatchResult:
    """Games of one player in one seat."""

    seat: int
    returns: np.ndarray
    illegal: int
    """Games that the player lost by an answer that is no legal move."""
    malformed: int = 0
    """Answers of the player that broke the required format."""
    answers: int = 0
    """All answers of the player."""

    @property
    def win_rate(self) -> Interval:
        """Share of games with a positive return."""
        return wilson(int((self.returns > 0).sum()), len(self.returns))

    @property
    def draw_rate(self) -> Interval:
        """Share of games with return zero."""
        return wilson(int((self.returns == 0).sum()), len(self.returns))

    @property
    def loss_rate(self) -> Interval:
        """Share of games with a negative return."""
        return wilson(int((self.returns < 0).sum()), len(self.returns))

    @property
    def illegal_rate(self) -> Interval:
        """Share of games that the player lost by an answer that is no legal move."""
        return wilson(self.illegal, len(self.returns))

    @property
    def malformed_rate(self) -> Interval:
        """Share of the player's answers that broke the required format."""
        return wilson(self.malformed, self.answers)

    def mean_return(self, rng: np.random.Generator) -> Interval:
        """Mean return with a bootstrap interval."""
        return bootstrap_mean(self.returns, rng)

    @staticmethod
    def joined(parts: Sequence[MatchResult]) -> MatchResult:
        """One result of several of the same seat, in order."""
        return replace(
            parts[0],
            returns=np.concatenate([part.returns for part in parts]),
            illegal=sum(part.illegal for part in parts),
            malformed=sum(part.malformed for part in parts),
            answers=sum(part.answers for part in parts),
        )


def play_matches(
    game: Game,
    player: Player,
    opponent: Player,
    seat: int,
    games: int,
    seed: int,
    first: int = 0,
    on_turn: OnTurn | None = None,
) -> MatchResult:
    """Play `games` games with `player` in `seat` and `opponent` in all other seats, all at once.

    Chance is drawn per game from (seed, game), so two players that meet the same seed get the same deals. A player
    whose answer is no legal move loses the most that the game can cost; the others share that evenly. A `Pool` as
    opponent draws its member once per game.

    Args:
        first: number of the first game, for the chunks of a longer match.
    """
    match = _Match(game, seat, games, seed, first, on_turn)
    opponents = [
        opponent.draw(np.random.default_rng((seed, first + index, 1))) if isinstance(opponent, Pool) else opponent
        for index in range(games)
    ]
    while waiting := match.waiting():
        groups: dict[int, tuple[Player, list[int]]] = {}
        for index in waiting:
            mover = player if match.states[index].current_player() == seat else opponents[index]
            groups.setdefault(id(mover), (mover, []))[1].append(index)
        for mover, indices in groups.values():
            match.move(mover, indices)
    return MatchResult(seat, match.returns, match.illegal, match.malformed, match.answers)


class _Match:
    """The games of one `play_matches` call while they are being played."""

    def __init__(self, game: Game, seat: int, games: int, seed: int, first: int, on_turn: OnTurn | None) -> None:
        self.game, self.seat, self.first, self.on_turn = game, seat, first, on_turn
        spiel = load(game)
        self.seats, self.worst = spiel.num_players(), spiel.min_utility()
        self.states: list[Any] = [spiel.new_initial_state() for _ in range(games)]
        self.chance = [np.random.default_rng((seed, first + index)) for index in range(games)]
        self.rng = np.random.default_rng((seed, games, seat, first))
        self.returns = np.full(games, np.nan)
        self.open = list(range(games))
        self.illegal = self.malformed = self.answers = 0

    def waiting(self) -> list[int]:
        """Let chance act, settle what is over, and say which games wait for a player."""
        still = []
        for index in self.open:
            state = self.states[index]
            advance_chance(state, self.chance[index])
            if state.is_terminal():
                self.returns[index] = state.returns()[self.seat]
            else:
                still.append(index)
        self.open = still
        return still

    def move(self, mover: Player, indices: list[int]) -> None:
        """One move in each of these games."""
        states = [self.states[index] for index in indices]
        reads_prompt = getattr(mover, "reads_prompt", True)
        decisions = [decision(self.game, state, reads_prompt) for state in states]
        for index, seen, move in zip(indices, decisions, mover.act(decisions, states, self.rng), strict=True):
            own = seen.seat == self.seat
            self.answers += own
            self.malformed += own and not move.well_formed
            if self.on_turn:
                self.on_turn(self.first + index, seen, move)
            if move.action is None:
                self.illegal += own
                self.returns[index] = illegal_returns(self.seats, seen.seat, self.worst)[self.seat]
                self.open.remove(index)
            else:
                self.states[index].apply_action(move.action)


def play_long(
    game: Game,
    player: Player,
    opponent: Player,
    seat: int,
    games: int,
    seed: int,
    workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> MatchResult:
    """`play_matches` in chunks, here or on Ray workers: the result is the same for every number of workers.

    Args:
        workers: Ray tasks at once; 0 plays in this process. The players must be picklable then.
        on_progress: called with the number of games of each finished chunk.
    """
    starts = range(0, games, CHUNK_GAMES)
    calls = [(game, player, opponent, seat, min(CHUNK_GAMES, games - start), seed, start) for start in starts]
    parts: list[MatchResult] = []
    with _runner(workers) as run:
        for call, part in zip(calls, run(calls), strict=True):
            parts.append(part)
            if on_progress:
                on_progress(call[4])
    return MatchResult.joined(parts)


@contextlib.contextmanager
def _runner(workers: int) -> Iterator[Callable[[list[Any]], Iterator[MatchResult]]]:
    """What plays a list of calls and gives their results in order; Ray is started if need be, and then stopped."""
    if workers == 0:
        yield lambda calls: (play_matches(*call) for call in calls)
        return
    from common.cluster import LOOPBACK, QUIET_ENV

    for name, value in QUIET_ENV.items():  # Ray reads some of it when it is imported
        os.environ.setdefault(name, value)
    import ray  # seconds to import, and most callers do without

    started = not ray.is_initialized()
    if started:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init("local", num_cpus=workers, _node_ip_address=LOOPBACK, **quiet)
    task = ray.remote(num_cpus=1)(play_matches)

    def run(calls: list[Any]) -> Iterator[MatchResult]:
        for reference in [task.remote(*call) for call in calls]:
            yield ray.get(reference)

    try:
        yield run
    finally:
        if started:
            ray.shutdown()
