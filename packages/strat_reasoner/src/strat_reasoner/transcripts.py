"""Games and reasoning as text that a person reads: one block per game, one line per turn, returns at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from strat_reasoner.evaluate_matches import play_matches
from strat_reasoner.games import Decision, Game, Move, Player, load

SAMPLE_GAMES = 5


class Transcript:
    """Collects turns as matches are played (give `turn` as `on_turn`), and writes them out.

    Between `begin` and `end` lie the games of one match: one player in one seat.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._blocks: list[str] = []
        self._names: tuple[str, ...] = ()
        self._turns: dict[int, list[str]] = defaultdict(list)

    def begin(self, names: Sequence[str]) -> None:
        """A match starts; `names` says who sits in each seat."""
        self._names = tuple(names)
        self._turns.clear()

    def turn(self, game: int, seen: Decision, move: Move) -> None:
        """Record one turn."""
        if move.action is None:
            played = "no legal move" if move.well_formed else "malformed answer"
        else:
            played = seen.words[seen.legal.index(move.action)]
        lines = [f"player {seen.seat} ({self._names[seen.seat]}) sees: {seen.facts}"]
        if move.text and move.text != played:
            lines += [f"    | {line}" for line in printable(move.text).splitlines()]
        self._turns[game].append("\n".join([*lines, f"    plays: {played}"]))

    def end(self, seat: int, returns: Sequence[float]) -> None:
        """The match is over; `returns` are those of `seat` in its games, in order."""
        for number, value in enumerate(returns):
            title = f"game {len(self._blocks) + 1}"
            self._blocks.append("\n".join([title, *self._turns[number], f"return of player {seat}: {value:+g}"]))

    def text(self) -> str:
        """The whole transcript."""
        return "\n\n".join([self.title, *self._blocks]) + "\n"

    def write(self, path: Path) -> None:
        """Write the text to a file, aside first and then renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".part")
        aside.write_text(self.text())
        aside.replace(path)


def sample_games(game: Game, player: Player, opponent: Player, seed: int, count: int = SAMPLE_GAMES) -> Transcript:
    """A transcript of `count` games in each seat: on the first deals of this seed."""
    seats = load(game).num_players()
    transcript = Transcript(f"{game.name}: {player.name} against {opponent.name}, seed {seed}")
    for seat in range(seats):
        transcript.begin([player.name if s == seat else opponent.name for s in range(seats)])
        result = play_matches(game, player, opponent, seat, count, seed, on_turn=transcript.turn)
        transcript.end(seat, result.returns.tolist())
    return transcript


def printable(text: str) -> str:
    """Text without control characters, which could move a terminal's cursor; tabs and line breaks stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
