"""One player measured against one opponent: played games in every seat, and exact values where the game allows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from strat_reasoner.evaluate import (
    EstimatedTable,
    Interval,
    estimate_table,
    exploitability,
    exploitability_interval,
    score_range,
    value_against,
    value_interval,
)
from strat_reasoner.evaluate_matches import MatchResult, play_long
from strat_reasoner.games import Game, Player, load
from strat_reasoner.opponents import PolicyTable
from strat_reasoner.opponents_named import exact_table


@dataclass(frozen=True)
class SeatReport:
    """Results in one seat; rates and returns of played games, values of the exact table."""

    seat: int
    games: int
    win_rate: Interval
    draw_rate: Interval
    loss_rate: Interval
    mean_return: Interval
    illegal_rate: Interval
    malformed_rate: Interval
    worst_return: float
    best_return: float
    """Ends of the normalised score: exact responses to the opponent, or the game's utility range."""
    normalised_score: Interval
    value: Interval | None
    """Exact expected return of the estimated table, answers that are no legal move counted as lost games."""


@dataclass(frozen=True)
class Report:
    """All seats, and what does not depend on the seat."""

    game: str
    policy: str
    opponent: str
    seed: int
    seats: tuple[SeatReport, ...]
    exploitability: Interval | None
    table_illegal_rate: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: intervals as {value, low, high}."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a person to read."""
        text = [f"{self.game}: {self.policy} against {self.opponent}, seed {self.seed}"]
        for seat in self.seats:
            rates = ((name, getattr(seat, f"{name}_rate")) for name in ("win", "draw", "loss"))
            text.append(f"seat {seat.seat}, {seat.games} games: " + ", ".join(f"{k} {_percent(v)}" for k, v in rates))
            text.append(f"  return {seat.mean_return} in [{seat.worst_return:+.3f}, {seat.best_return:+.3f}]")
            if seat.value:
                text.append(f"  exact value {seat.value}")
            score = seat.normalised_score
            text.append(f"  normalised score {score.value:.1f} [{score.low:.1f}, {score.high:.1f}]")
            bad = f"illegal {_percent(seat.illegal_rate)} of games"
            text.append(f"  {bad}, malformed {_percent(seat.malformed_rate)} of answers")
        if self.exploitability:
            text.append(f"exploitability {self.exploitability}")
        if self.table_illegal_rate is not None:
            text.append(f"illegal answers over all information states {self.table_illegal_rate:.1%}")
        return text

    def metrics(self) -> dict[str, float]:
        """Names and values for MLflow."""
        values: dict[str, float] = {}
        for seat in self.seats:
            for name in ("win_rate", "mean_return", "normalised_score", "illegal_rate", "malformed_rate"):
                values[f"{name}/{self.game}/seat{seat.seat}"] = getattr(seat, name).value
            if seat.value:
                values[f"value/{self.game}/seat{seat.seat}"] = seat.value.value
        if self.exploitability:
            values[f"exploitability/{self.game}"] = self.exploitability.value
        return values


def evaluate_player(
    game: Game,
    player: Player,
    opponent: Player,
    games: int,
    samples: int,
    seed: int,
    workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Report:
    """Play `games` games in each seat, and add exact values if game and opponent have tables.

    Args:
        samples: answers per information state for the player's table; unused for a player that has a table.
        workers: Ray tasks at once; 0 plays in this process.
    """
    other = exact_table(opponent, game)
    table = _table(game, player, samples, seed) if game.tabular else None
    seats = []
    for seat in range(load(game).num_players()):
        match = play_long(game, player, opponent, seat, games, seed, workers, on_progress)
        seats.append(_seat(game, match, table, other, np.random.default_rng((seed, seat))))
    rng = np.random.default_rng((seed, len(seats)))
    return Report(
        game=game.name,
        policy=player.name,
        opponent=opponent.name,
        seed=seed,
        seats=tuple(seats),
        exploitability=_exploitability(game, table, rng) if table else None,
        table_illegal_rate=table.illegal_rate if isinstance(table, EstimatedTable) else None,
    )


def _percent(rate: Interval) -> str:
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def _table(game: Game, player: Player, samples: int, seed: int) -> EstimatedTable | PolicyTable:
    exact = exact_table(player, game)
    return exact or estimate_table(player, game, samples, np.random.default_rng(seed), counting_illegal=True)


def _exploitability(game: Game, table: EstimatedTable | PolicyTable, rng: np.random.Generator) -> Interval:
    if isinstance(table, EstimatedTable):
        return exploitability_interval(game, table, rng)
    value = exploitability(game, table)
    return Interval(value, value, value)


def _value(
    game: Game, table: EstimatedTable | PolicyTable, other: PolicyTable, seat: int, rng: np.random.Generator
) -> Interval:
    if isinstance(table, EstimatedTable):
        return value_interval(game, table, other, seat, rng)
    value = value_against(game, table, other, seat)
    return Interval(value, value, value)


def _seat(
    game: Game,
    match: MatchResult,
    table: EstimatedTable | PolicyTable | None,
    other: PolicyTable | None,
    rng: np.random.Generator,
) -> SeatReport:
    worst, best = score_range(game, other, match.seat)
    mean, value = match.mean_return(rng), None
    if other and table:
        value = _value(game, table, other, match.seat, rng)
    return SeatReport(
        seat=match.seat,
        games=len(match.returns),
        win_rate=match.win_rate,
        draw_rate=match.draw_rate,
        loss_rate=match.loss_rate,
        mean_return=mean,
        illegal_rate=match.illegal_rate,
        malformed_rate=match.malformed_rate,
        worst_return=worst,
        best_return=best,
        normalised_score=(value or mean).scaled(worst, best),
        value=value,
    )
