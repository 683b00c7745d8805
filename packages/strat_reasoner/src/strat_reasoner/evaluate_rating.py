"""Ratings of many players from who beat whom: Bradley-Terry strengths on the Elo scale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyspiel

from common.config import ConfigError
from strat_reasoner.evaluate_intervals import BOOTSTRAPS, Interval, percentile_interval
from strat_reasoner.evaluate_matches import play_long
from strat_reasoner.games import Game, Player, load

ELO_PER_NAT = 400 / np.log(10)
PRIOR_GAMES = 1.0
"""Drawn games between every two players, added so that one who never lost has a finite rating."""


@dataclass(frozen=True)
class Tournament:
    """Results of every pair: `points[i, j]` are the points of i against j in each game, from 0 to 1; j has the rest."""

    names: tuple[str, ...]
    points: dict[tuple[int, int], np.ndarray]

    def ratings(self, rng: np.random.Generator, n: int = BOOTSTRAPS) -> list[Interval]:
        """Elo of each player (mean 0), with percentile intervals from resampling the games of every pair."""
        plain = bradley_terry(self._wins(self.points))
        draws = []
        for _ in range(n):
            resampled = {pair: p[rng.integers(len(p), size=len(p))] for pair, p in self.points.items()}
            draws.append(bradley_terry(self._wins(resampled)))
        return [percentile_interval(float(plain[i]), np.array(draws)[:, i]) for i in range(len(self.names))]

    def _wins(self, points: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
        wins = np.zeros((len(self.names), len(self.names)))
        for (i, j), scored in points.items():
            wins[i, j] += scored.sum()
            wins[j, i] += (1 - scored).sum()
        return wins


def bradley_terry(wins: np.ndarray, iterations: int = 500, prior: float = PRIOR_GAMES) -> np.ndarray:
    """Elo ratings of mean 0 from a matrix of wins, by Hunter's MM algorithm (Annals of Statistics 2004).

    The model: i beats j with probability s_i / (s_i + s_j); Elo is 400 log10 s. A draw counts half a win to each.

    Args:
        wins: `wins[i, j]` is how often i beat j. Shape (P, P).
        prior: drawn games added between every two players.
    """
    padded = wins + prior / 2 * (1 - np.eye(len(wins)))
    np.fill_diagonal(padded, 0.0)
    games, total = padded + padded.T, padded.sum(1)
    strength = np.ones(len(wins))
    for _ in range(iterations):
        before = strength
        strength = total / (games / (before[:, None] + before[None, :])).sum(1)
        strength /= np.exp(np.log(strength).mean())
        if np.abs(np.log(strength / before)).max() < 1e-9:
            break
    ratings: np.ndarray = ELO_PER_NAT * np.log(strength)
    return ratings


def tournament(game: Game, players: Sequence[Player], games: int, seed: int, workers: int = 0) -> Tournament:
    """Every pair plays `games` games in each order of the seats, all pairs on the same deals.

    Points are returns scaled to 0..1, half for a draw. Where stakes differ, as in poker, wins alone would mislead: in
    Kuhn, uniform play wins more games against the equilibrium than it loses, but fewer chips.
    """
    spiel = load(game)
    if spiel.num_players() != 2 or spiel.get_type().utility != pyspiel.GameType.Utility.ZERO_SUM:
        raise ConfigError(f"{game.name}: ratings need a zero-sum game of two players")
    points = {}
    for i, j in itertools.combinations(range(len(players)), 2):
        results = [play_long(game, players[i], players[j], seat, games, seed, workers) for seat in (0, 1)]
        points[i, j] = np.concatenate([0.5 + result.returns / (2 * spiel.max_utility()) for result in results])
    return Tournament(tuple(player.name for player in players), points)
