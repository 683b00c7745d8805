"""95 % intervals: Wilson's for rates, the bootstrap for means, paired differences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
BOOTSTRAPS = 500


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    def scaled(self, worst: float, best: float) -> Interval:
        """The normalised score: 0 at `worst`, 100 at `best`."""
        return Interval(*(100 * (x - worst) / (best - worst) for x in (self.value, self.low, self.high)))


def wilson(successes: int, trials: int, z: float = 1.959964) -> Interval:
    """A rate with Wilson's score interval (Wilson 1927)."""
    if trials == 0:
        return Interval(0.0, 0.0, 1.0)
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * float(np.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)))
    return Interval(rate, max(0.0, centre - half), min(1.0, centre + half))


def bootstrap_mean(values: np.ndarray, rng: np.random.Generator, n: int = BOOTSTRAPS) -> Interval:
    """The mean of independent values with a percentile bootstrap interval."""
    draws = values[rng.integers(len(values), size=(n, len(values)))].mean(1)
    return percentile_interval(float(values.mean()), draws)


def paired_difference(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> Interval:
    """Mean of first - second with its interval, game by game: for matches that met the same chance events.

    Raises:
        ValueError: the two do not have the same number of games.
    """
    if len(first) != len(second):
        raise ValueError(f"paired games must be as many on both sides, not {len(first)} and {len(second)}")
    return bootstrap_mean(first - second, rng)


def percentile_interval(value: float, draws: np.ndarray) -> Interval:
    """`value` with the central 95 % of its bootstrap replicates."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Interval(value, float(low), float(high))
