"""Speed of games and evaluation: `name: value unit` lines. Run: .venv/bin/python experiments/bench/bench_games.py"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from strat_reasoner import games
from strat_reasoner.evaluate import exploitability, value_against
from strat_reasoner.evaluate_matches import play_long
from strat_reasoner.evaluate_tree import game_tree
from strat_reasoner.games import get_game
from strat_reasoner.opponents import RandomPlayer, equilibrium, uniform_table
from strat_reasoner.opponents_search import MctsPlayer

GAMES = 10_000
MCTS_GAMES = 1000


def cpu_s(action: Callable[[], object]) -> float:
    """CPU-seconds of one call in this process."""
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> None:
    """Print all lines."""
    for name in games.names():
        game, player = get_game(name), RandomPlayer()
        seconds = cpu_s(lambda game=game, player=player: play_long(game, player, player, 0, GAMES, seed=0))  # type: ignore[misc]
        print(f"random_games_{name}: {seconds:.2f} CPU-s per {GAMES} games", flush=True)
    board = get_game("tic-tac-toe")
    for rollouts in (1, 10):
        searcher = MctsPlayer(board, 1000, rollouts)
        start = time.monotonic()
        play_long(board, RandomPlayer(), searcher, 0, MCTS_GAMES // 2, seed=0, workers=2)
        play_long(board, RandomPlayer(), searcher, 1, MCTS_GAMES // 2, seed=0, workers=2)
        elapsed_s = time.monotonic() - start
        print(f"mcts_1000x{rollouts}_games: {elapsed_s:.1f} s per {MCTS_GAMES} games on 2 workers", flush=True)
    leduc = get_game("leduc")
    print(f"leduc_tree: {cpu_s(lambda: game_tree(leduc)):.3f} CPU-s once", flush=True)
    solved = equilibrium(leduc)
    rng = np.random.default_rng(0)
    table = {infoset: rng.dirichlet(np.ones(len(row))) for infoset, row in uniform_table(leduc).items()}

    def evaluation() -> None:
        exploitability(leduc, table)
        for seat in (0, 1):
            value_against(leduc, table, solved, seat)

    print(f"leduc_exact_evaluation: {statistics.median(cpu_s(evaluation) for _ in range(5)):.4f} CPU-s")


if __name__ == "__main__":
    main()
