"""Evaluation of the current policy on the workers that hold it: exact values from its table, and played games."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strat_reasoner.config import TrainConfig
from strat_reasoner.evaluate import (
    EstimatedTable,
    Interval,
    MatchResult,
    bootstrap,
    bootstrap_gain,
    exploitability,
    value_against,
)
from strat_reasoner.games import Player, get_game, load
from strat_reasoner.opponents import PolicyTable, RandomPlayer, TablePlayer, equilibrium
from strat_reasoner.policy import numpy_rng
from strat_reasoner.ray_roles import RayRoles

OPPONENTS = ("equilibrium", "random", "self")


@dataclass(frozen=True)
class Evaluation:
    """One policy's results; `matches[opponent, seat]` are played games."""

    game: str
    table: EstimatedTable
    exploitability: Interval
    equilibrium_value: Interval
    """Exact expected return against the equilibrium, averaged over the seats."""
    matches: dict[tuple[str, int], MatchResult]
    seed: int

    def mean_return(self, opponent: str, seat: int) -> Interval:
        """Mean return of the played games."""
        return self.matches[opponent, seat].mean_return(numpy_rng(self.seed, "returns", seat))

    def metrics(self) -> dict[str, float]:
        """Names and values for MLflow."""
        values = {
            f"exploitability/{self.game}": self.exploitability.value,
            f"equilibrium_value/{self.game}": self.equilibrium_value.value,
            f"illegal_rate/{self.game}": self.table.illegal_rate,
        }
        for (opponent, seat), match in self.matches.items():
            values[f"win_rate/{self.game}/{opponent}/seat{seat}"] = match.win_rate.value
            values[f"return/{self.game}/{opponent}/seat{seat}"] = float(match.returns.mean())
        return values


def evaluate(roles: RayRoles, train: TrainConfig, samples: int, games: int) -> Evaluation:
    """Estimate the table and play the matches, on all rollout workers at once."""
    game = get_game(train.game)
    solved = equilibrium(game)
    table = roles.estimate_table(samples, train.seed)
    players: dict[str, Player | None] = {
        "equilibrium": TablePlayer(solved, "equilibrium"),
        "random": RandomPlayer(),
        "self": None,
    }
    matches = {}
    for opponent in OPPONENTS:
        for seat in range(load(game).num_players()):
            matches[opponent, seat] = _play(roles, players[opponent], seat, games, train.seed)
    rng = numpy_rng(train.seed, "bootstrap")
    return Evaluation(
        game=game.name,
        table=table,
        exploitability=bootstrap(lambda t: exploitability(game, t), table, rng),
        equilibrium_value=bootstrap(lambda t: mean_value(train, t, solved), table, rng),
        matches=matches,
        seed=train.seed,
    )


def _play(roles: RayRoles, opponent: Player | None, seat: int, games: int, seed: int) -> MatchResult:
    """Share the games out over the rollout workers; each has its own deals."""
    workers = len(roles.rollout)
    shares = [games * (w + 1) // workers - games * w // workers for w in range(workers)]
    calls = [(opponent, seat, share, seed * 1000 + w) for w, share in enumerate(shares)]
    parts = roles.rollout.call_each("play_share", calls)
    return MatchResult(seat, np.concatenate([p.returns for p in parts]), sum(p.illegal for p in parts))


def mean_value(train: TrainConfig, table: PolicyTable, opponent: PolicyTable) -> float:
    """Exact return against `opponent`, averaged over the seats."""
    game = get_game(train.game)
    seats = load(game).num_players()
    return sum(value_against(game, table, opponent, seat) for seat in range(seats)) / seats


def gains(before: Evaluation, after: Evaluation, train: TrainConfig) -> dict[str, Interval]:
    """after - before with intervals: the fall in exploitability, and the rise in value against the equilibrium."""
    game = get_game(train.game)
    solved = equilibrium(game)
    rng = numpy_rng(train.seed, "bootstrap gains")
    return {
        "exploitability_fall": bootstrap_gain(lambda t: -exploitability(game, t), before.table, after.table, rng),
        "equilibrium_value": bootstrap_gain(lambda t: mean_value(train, t, solved), before.table, after.table, rng),
    }
