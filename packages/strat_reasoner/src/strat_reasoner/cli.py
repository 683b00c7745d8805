"""The command line of Strat-Reasoner: train on one machine, evaluate players, and play against one.

`experiments/strat_across.py` trains over several sites; this is the same method in one process.
"""

from __future__ import annotations

import json
import secrets
import sys
import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common import checkpoint, config
from common.config import ConfigError
from common.tracking import Tracker
from strat_reasoner.config import TrainConfig
from strat_reasoner.evaluate_rating import tournament
from strat_reasoner.evaluate_report import Report, evaluate_player
from strat_reasoner.games import Game, get_game, names
from strat_reasoner.games import load as spiel_game
from strat_reasoner.model_player import ModelPlayer
from strat_reasoner.opponents_named import make_player
from strat_reasoner.rollout import RolloutWorker
from strat_reasoner.terminal import play_person
from strat_reasoner.train import LocalRoles, StepRecord, run_step
from strat_reasoner.transcripts import Transcript, sample_games

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
SAVE_EVERY = 10


@app.callback()
def _commands() -> None:
    """Teaches a language model to play games by recursive reasoning about the other player."""


@app.command()
def train(
    output: Annotated[Path, typer.Option("--output", help="folder for checkpoints; training resumes from it")],
    config_file: Annotated[Path | None, typer.Option("--config", help="a TrainConfig as YAML; default: Kuhn")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value over the file")] = None,
) -> None:
    """Warm-start and train a model in this process; run again with the same --output to continue.

    Example: strat-reasoner train --output out --set steps=20 --set advantage.estimator=marshal
    """
    data = config.read_yaml(config_file) if config_file else {}
    cfg = config.validate(TrainConfig, config.apply_overrides(data, overrides or []), where=str(config_file or "--set"))
    roles = LocalRoles(cfg)
    with _progress() as progress:
        start = _start_or_resume(roles, cfg, output, progress)
        bar = progress.add_task("training", total=cfg.steps, completed=start)
        for step in range(start, cfg.steps):
            record = run_step(roles, step)
            progress.update(bar, advance=1, description=f"training: {_line(record)}")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == cfg.steps:
                save(roles, output, step + 1)


def _start_or_resume(roles: LocalRoles, cfg: TrainConfig, output: Path, progress: Progress) -> int:
    """Load the newest checkpoint of `output`, or warm-start and write checkpoint 0; returns the next step."""
    found = checkpoint.load_latest(output)
    if found is None:
        bar = progress.add_task("warm start", total=cfg.warmstart.steps)
        for step in range(cfg.warmstart.steps):
            loss = roles.learner.warm_start_steps(range(step, step + 1))[0]
            progress.update(bar, advance=1, description=f"warm start: loss {loss:.3f}")
        roles.learner.use_as_reference()
        save(roles, output, 0)
    else:
        if found.meta["config"] != cfg.model_dump(mode="json"):
            raise ConfigError(f"{output}: was trained with another configuration; give another --output")
        load(roles, found)
    roles.sync_weights()
    return found.step if found else 0


def save(roles: LocalRoles, output: Path, step: int) -> None:
    """Write everything that an exact resume needs."""
    tensors, meta = roles.learner.state()
    checkpoint.save(output, step, tensors, meta | {"baselines": roles.comparer.memory.baselines})


def load(roles: LocalRoles, found: checkpoint.Checkpoint) -> None:
    """Continue from a checkpoint that `save` wrote."""
    roles.learner.load_state(found.tensors, found.meta)
    roles.comparer.memory.baselines = dict(found.meta["baselines"])


def _line(record: StepRecord) -> str:
    m = record.metrics
    return f"kl {m['train/kl']:.3f} S {m['score/total']:.2f} malformed {m['rollout/malformed']:.1%}"


PolicyOption = Annotated[
    str, typer.Option("--policy", help="the player to measure: a checkpoint folder, or a name as for --opponent")
]
OpponentOption = Annotated[
    str,
    typer.Option(
        "--opponent",
        help="random, first-legal, equilibrium, perfect, mcts:SIMULATIONS, best-response:PLAYER, a checkpoint folder, "
        "or a pool like 2*random,1*mcts:100",
    ),
]
GameOption = Annotated[str | None, typer.Option("--game", help="default: the game of the checkpoint")]


@app.command()
def evaluate(
    policy: PolicyOption,
    opponent: OpponentOption = "random",
    game_name: GameOption = None,
    games: Annotated[int, typer.Option("--games", min=1, help="played games in each seat")] = 500,
    samples: Annotated[int, typer.Option("--samples", min=2, help="answers per information state")] = 256,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Ray tasks at once; 0: this process")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    transcripts: Annotated[Path | None, typer.Option("--transcripts", help="write some games here as text")] = None,
    mlflow_uri: Annotated[str | None, typer.Option("--mlflow", help="record into MLflow at this address")] = None,
) -> None:
    """Win rates, returns and exact values of a player against an opponent, in every seat, with 95 % intervals.

    Examples:

      strat-reasoner evaluate --policy out --opponent equilibrium

      strat-reasoner evaluate --policy random --game tic-tac-toe --opponent mcts:1000 --workers 2 --json
    """
    game = _game_of([policy, opponent], game_name)
    player = make_player(policy, game, load_player, seed)
    other = make_player(opponent, game, load_player, seed)
    with _progress() as progress:
        bar = progress.add_task("games", total=games * spiel_game(game).num_players())
        report = evaluate_player(
            game, player, other, games, samples, seed, workers, lambda count: progress.advance(bar, count)
        )
    print(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()), flush=True)
    if transcripts or mlflow_uri:
        text = sample_games(game, player, other, seed)
        if transcripts:
            text.write(transcripts)
        if mlflow_uri:
            _record(mlflow_uri, report, text)


def _record(uri: str, report: Report, text: Transcript) -> None:
    """One MLflow run with the report's metrics, the whole report and the transcripts."""
    tracker = Tracker(uri, "strat-reasoner evaluate", f"{report.policy} against {report.opponent}")
    tracker.params({"game": report.game, "policy": report.policy, "opponent": report.opponent, "seed": report.seed})
    tracker.metrics(report.metrics())
    tracker.text(json.dumps(report.as_dict(), indent=1), "evaluation.json")
    tracker.text(text.text(), "transcripts.txt")
    tracker.close()


@app.command()
def rate(
    game_name: Annotated[str, typer.Option("--game")],
    players: Annotated[list[str], typer.Option("--player", help="give it for each; as --opponent of `evaluate`")],
    games: Annotated[int, typer.Option("--games", min=1, help="games of each pair in each order of seats")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Ray tasks at once; 0: this process")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Elo ratings (Bradley-Terry) of checkpoints and opponents that all play each other, with 95 % intervals.

    Example: strat-reasoner rate --game kuhn --player out/step-000000 --player out/step-000040 --player equilibrium
    """
    game = get_game(game_name)
    if len(players) < 2:
        raise ConfigError("--player: give at least two")
    found = tournament(game, [make_player(text, game, load_player, seed) for text in players], games, seed, workers)
    ratings = dict(zip(players, found.ratings(np.random.default_rng(seed)), strict=True))
    if as_json:
        print(json.dumps({name: vars(rating) for name, rating in ratings.items()}, indent=1))
        return
    for name, rating in sorted(ratings.items(), key=lambda item: -item[1].value):
        print(f"{rating.value:+7.0f} [{rating.low:+.0f}, {rating.high:+.0f}]  {name}")


@app.command()
def play(
    opponent: OpponentOption,
    game_name: GameOption = None,
    seat: Annotated[int, typer.Option("--seat", min=0, help="your seat; 0 moves first")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="default: another game each time")] = None,
    reveal: Annotated[bool, typer.Option("--reveal", help="show reasoning at once, not when the game is over")] = False,
    transcript: Annotated[Path | None, typer.Option("--transcript", help="write the game here as text")] = None,
) -> None:
    """Play one game in the terminal; what a model reasoned is shown at the end (it may name its hidden card).

    Examples:

      strat-reasoner play --opponent out

      strat-reasoner play --opponent mcts:100 --game connect-four --seat 1
    """
    game = _game_of([opponent], game_name)
    seats = spiel_game(game).num_players()
    if seat >= seats:
        raise ConfigError(f"--seat: {seat} is not a seat of {game.name}; give 0 to {seats - 1}")
    chosen = seed if seed is not None else secrets.randbelow(2**31)
    played = play_person(game, make_player(opponent, game, load_player, chosen), seat, chosen, reveal)
    if transcript:
        played.write(transcript)


def _game_of(players: list[str], name: str | None) -> Game:
    """The game asked for, or that of the first saved model."""
    if name:
        return get_game(name)
    for text in players:
        if Path(text).is_dir():
            return get_game(_saved(Path(text))[1].game)
    raise ConfigError(f"--game: is needed without a checkpoint; games are {', '.join(names())}")


def _saved(path: Path) -> tuple[checkpoint.Checkpoint, TrainConfig]:
    found = checkpoint.load(path) if (path / checkpoint.META).exists() else checkpoint.load_latest(path)
    if found is None:
        raise ConfigError(f"{path}: holds no checkpoint (a folder step-NNNNNN with {checkpoint.META})")
    return found, config.validate(TrainConfig, found.meta["config"], where=str(path))


def load_player(path: Path, game: Game) -> ModelPlayer:
    """The model of a checkpoint folder (step-NNNNNN, or the folder that holds them) as a player of `game`."""
    found, cfg = _saved(path)
    if cfg.game != game.name:
        raise ConfigError(f"{path}: was trained for {cfg.game}, not for {game.name}; give --game {cfg.game}")
    worker = RolloutWorker(cfg)
    worker.load_weights(found.tensors["policy"])
    return ModelPlayer(worker.model, worker.vocabulary, cfg.rollout, name=f"{path.name} (step {found.step})")


def _progress() -> Progress:
    """On standard error, so that standard output can be piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def main() -> None:
    """Entry point; a ConfigError becomes one line and exit code 2, Ctrl-C keeps the last checkpoint."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}; give another path", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
