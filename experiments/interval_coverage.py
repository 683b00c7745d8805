"""How often the 95 % intervals hold the exact value on Kuhn poker, and how much less the table estimate scatters.

Writes experiments/results/interval_coverage.json. Run: .venv/bin/python experiments/interval_coverage.py [repeats]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from strat_reasoner.evaluate import (
    EstimatedTable,
    Interval,
    exploitability,
    exploitability_interval,
    play_matches,
    value_against,
    value_interval,
)
from strat_reasoner.evaluate_tree import game_tree
from strat_reasoner.games import get_game
from strat_reasoner.opponents import PolicyTable, TablePlayer, equilibrium, mix, uniform_table

KUHN = get_game("kuhn")
SAMPLES, GAMES, SEAT = 128, 200, 0
SHARES = (0.5, 0.9)
"""Policies: half way from uniform play to the equilibrium, and near it."""
RESULT = Path(__file__).parent / "results" / "interval_coverage.json"


def estimated(table: PolicyTable, samples: int, rng: np.random.Generator, drawn: bool) -> EstimatedTable:
    """What a player of this policy yields: drawn moves, or move probabilities that vary with its reasoning."""
    rows = {}
    for infoset, row in table.items():
        if drawn:
            picked = (rng.random((samples, 1)) > row.cumsum()).sum(1).clip(0, len(row) - 1)
            rows[infoset] = np.eye(len(row))[picked]
        else:
            rows[infoset] = 0.5 * row + 0.5 * rng.dirichlet(4 * row, size=samples)
    return EstimatedTable(rows)


def exact_win_rate(table: PolicyTable, opponent: PolicyTable) -> float:
    """Probability of a positive return in SEAT."""
    tree = game_tree(KUHN)
    reach_T = tree.chance_T * tree.reach(tree.flat(table), SEAT) * tree.reach(tree.flat(opponent), 1 - SEAT)
    return float(reach_T[tree.returns_TS[:, SEAT] > 0].sum())


def study(repeats: int, share: float, samples: int = SAMPLES, games: int = GAMES) -> dict[str, float]:
    """Coverage of each interval over `repeats` evaluations of `share` equilibrium and the rest uniform play."""
    solved = equilibrium(KUHN)
    policy = mix(solved, uniform_table(KUHN), share)
    exact = {
        "table_value_drawn_moves": value_against(KUHN, policy, solved, SEAT),
        "table_value": value_against(KUHN, policy, solved, SEAT),
        "table_exploitability_drawn_moves": exploitability(KUHN, policy),
        "table_exploitability": exploitability(KUHN, policy),
        "played_return": value_against(KUHN, policy, solved, SEAT),
        "played_win_rate": exact_win_rate(policy, solved),
    }
    held = dict.fromkeys(exact, 0)
    values: dict[str, list[float]] = {name: [] for name in exact}
    for repeat in track(range(repeats), description="coverage", transient=True):
        rng = np.random.default_rng((11, repeat))
        drawn, averaged = (estimated(policy, samples, rng, drawn) for drawn in (True, False))
        match = play_matches(KUHN, TablePlayer(policy, "p"), TablePlayer(solved, "e"), SEAT, games, seed=repeat)
        intervals: dict[str, Interval] = {
            "table_value_drawn_moves": value_interval(KUHN, drawn, solved, SEAT, rng),
            "table_value": value_interval(KUHN, averaged, solved, SEAT, rng),
            "table_exploitability_drawn_moves": exploitability_interval(KUHN, drawn, rng),
            "table_exploitability": exploitability_interval(KUHN, averaged, rng),
            "played_return": match.mean_return(rng),
            "played_win_rate": match.win_rate,
        }
        for name, interval in intervals.items():
            held[name] += interval.low <= exact[name] <= interval.high
            values[name].append(interval.value)
    return {f"coverage/{name}": held[name] / repeats for name in exact} | {
        f"standard_error/{name}": float(np.std(values[name])) for name in exact
    }


def variance_ratio(repeats: int, games: int = 240) -> float:
    """Standard error of plain play over that of the exact table from drawn moves, at the same number of answers.

    `games` games in one seat of Kuhn ask a player at least `games` times; the table spends exactly `games` answers, as
    many at each of the seat's six information states.
    """
    solved = equilibrium(KUHN)
    policy = mix(solved, uniform_table(KUHN), 0.5)
    played, exact = [], []
    for repeat in range(repeats):
        rng = np.random.default_rng((12, repeat))
        match = play_matches(KUHN, TablePlayer(policy, "p"), TablePlayer(solved, "e"), SEAT, games, seed=repeat)
        played.append(match.returns.mean())
        table = estimated(policy, games // 6, rng, drawn=True).table()
        exact.append(value_against(KUHN, table, solved, SEAT))
    return float(np.std(played) / np.std(exact))


def main() -> None:
    """Run the study and write its result."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    result: dict[str, Any] = {"repeats": repeats, "samples": SAMPLES, "games": GAMES}
    for share in SHARES:
        result[f"equilibrium_share_{share}"] = study(repeats, share)
    result["standard_error_ratio_play_to_table"] = variance_ratio(repeats)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
