"""A person plays in the terminal: moves are typed, hidden reasoning is shown when it can no longer help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from strat_reasoner.evaluate_matches import play_matches
from strat_reasoner.games import Decision, Game, Move, Player, load
from strat_reasoner.parsing import parse_move
from strat_reasoner.transcripts import Transcript, printable


class Person:
    """Asks at the terminal for each move until it is legal."""

    name = "you"

    def __init__(self, console: Console) -> None:
        self.console = console

    def act(self, decisions: Sequence[Decision], states: Sequence[Any], rng: np.random.Generator) -> list[Move]:
        """See `Player.act`."""
        return [self._ask(seen) for seen in decisions]

    def _ask(self, seen: Decision) -> Move:
        self.console.print(f"\n{escape(seen.prompt)}", highlight=False)
        while True:
            word = self.console.input("your move: ")
            action = parse_move(word, seen)
            if action is not None:
                return Move(action, seen.words[seen.legal.index(action)])
            self.console.print(f"{escape(printable(word)[:40])!r} is no legal move here", highlight=False)


def play_person(
    game: Game, opponent: Player, seat: int, seed: int, reveal: bool, console: Console | None = None
) -> Transcript:
    """One game of a person in `seat` against `opponent` in all other seats; returns its transcript.

    Args:
        reveal: show the opponent's reasoning as it moves; otherwise only when the game is over.
    """
    console = console or Console()
    transcript = Transcript(f"{game.name}: you against {opponent.name}, seed {seed}")
    seats = load(game).num_players()
    transcript.begin(["you" if s == seat else opponent.name for s in range(seats)])

    def turn(number: int, seen: Decision, move: Move) -> None:
        transcript.turn(number, seen, move)
        if seen.seat == seat:
            return
        if reveal:
            console.print(escape(printable(move.text)), style="dim", highlight=False)
        played = "gives no legal move" if move.action is None else f"plays {seen.words[seen.legal.index(move.action)]}"
        console.print(f"player {seen.seat} ({escape(opponent.name)}) {played}", highlight=False)

    result = play_matches(game, Person(console), opponent, seat, 1, seed, on_turn=turn)
    transcript.end(seat, result.returns.tolist())
    console.print(f"\nThe game is over; your return is {result.returns[0]:+g}. What everyone saw and wrote:\n")
    console.print(escape(transcript.text()), highlight=False)
    return transcript
