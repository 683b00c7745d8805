"""The command line of Strat-Reasoner: train on one machine, and evaluate a checkpoint.

`experiments/strat_across.py` trains over several sites; this is the same method in one process.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common import checkpoint, config
from common.config import ConfigError
from strat_reasoner.config import TrainConfig
from strat_reasoner.evaluate import bootstrap, estimate_table, exploitability, value_against
from strat_reasoner.games import get_game
from strat_reasoner.model_player import ModelPlayer
from strat_reasoner.opponents import equilibrium
from strat_reasoner.policy import numpy_rng
from strat_reasoner.rollout import RolloutWorker
from strat_reasoner.train import LocalRoles, StepRecord, run_step

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


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(help="a checkpoint folder (step-NNNNNN), or the folder that holds them")],
    samples: Annotated[int, typer.Option("--samples", help="reasonings per information state")] = 256,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Exact value and exploitability of a checkpoint's policy, with 95 % intervals.

    Example: strat-reasoner evaluate out --samples 512
    """
    found = checkpoint.load(path) if (path / checkpoint.META).exists() else checkpoint.load_latest(path)
    if found is None:
        raise ConfigError(f"{path}: holds no checkpoint (a folder step-NNNNNN with {checkpoint.META})")
    cfg = config.validate(TrainConfig, found.meta["config"], where=str(path))
    worker = RolloutWorker(cfg)
    worker.load_weights(found.tensors["policy"])
    game = get_game(cfg.game)
    player = ModelPlayer(worker.model, worker.vocabulary, cfg.rollout)
    table = estimate_table(player, game, samples, numpy_rng(seed, "table"))
    solved, rng = equilibrium(game), numpy_rng(seed, "bootstrap")
    results: dict[str, Any] = {"step": found.step, "illegal_rate": table.illegal_rate}
    intervals = {"exploitability": bootstrap(lambda t: exploitability(game, t), table, rng)}
    for seat in (0, 1):
        name = f"value_against_equilibrium_seat{seat}"
        intervals[name] = bootstrap(lambda t, s=seat: value_against(game, t, solved, s), table, rng)  # type: ignore[misc]
    if as_json:
        print(json.dumps(results | {name: vars(value) for name, value in intervals.items()}, indent=1))
        return
    Console().print(f"step {found.step}, illegal answers {table.illegal_rate:.1%}", highlight=False)
    for name, value in intervals.items():
        print(f"{name}: {value}")


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def main() -> None:
    """Entry point; a ConfigError becomes one line and exit code 2, Ctrl-C keeps the last checkpoint."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}; give another --output", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
