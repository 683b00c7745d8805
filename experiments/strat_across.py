"""The main job: place an RL job over several sites by the Explorer, measure that placement against production, train.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python experiments/strat_across.py --config experiments/configs/demo.yaml --set train.seed=3

It runs inside a Ray cluster whose nodes carry the label `site` (`make up` starts a simulated one) and records one
parent run in MLflow, with a child run for each phase. What it does, in order, is `run` below.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import typer
import yaml
from pydantic import Field
from rich.console import Console

from common import checkpoint, config
from common.config import Config, ConfigError
from common.links import Mode
from common.messages import Routes
from common.placement import reserve
from common.spec import ClusterSpec
from common.tracking import Tracker
from evaluation import Evaluation, evaluate, gains
from scale_across.cli import exploration_table
from scale_across.rl_job import RlJob, RlPlan, RlProfile, production
from scale_across.rl_search import RlExploration, explore_rl
from strat_reasoner.config import TrainConfig
from strat_reasoner.ray_roles import Network, RayRoles
from strat_reasoner.train import StepRecord, train
from summary import Measured, games_table, plans_table

EXPERIMENT = "stratacross"
WARM_CHUNK = 40


class JobShape(Config):
    """How many workers each role has; the comparison has one."""

    learner_ranks: int = Field(default=3, gt=0, le=64)
    rollout_workers: int = Field(default=2, gt=0, le=64)


class Measure(Config):
    """Pairs of steps under each placement, links off and on in turn, so that a host's drift meets both alike."""

    pairs: int = Field(default=4, ge=2)
    """The first pair is a warm-up."""


class Evaluate(Config):
    """Effort of the evaluations before and after training."""

    table_samples: int = Field(default=384, gt=1)
    """Reasonings sampled at each information state."""
    games: int = Field(default=400, gt=0)
    """Played per opponent and seat."""


class StratAcross(Config):
    """The whole experiment."""

    name: str = "strat_across"
    cluster: ClusterSpec
    job: JobShape = JobShape()
    measure: Measure = Measure()
    evaluate: Evaluate = Evaluate()
    train: TrainConfig = TrainConfig()


@dataclass
class Context:
    """What the phases share."""

    config: StratAcross
    tracker: Tracker
    console: Console
    output: Path

    def say(self, text: str) -> None:
        """Print a line at once; a job's log is followed by a person."""
        self.console.print(text, highlight=False, soft_wrap=True)


def run(ctx: Context) -> None:
    """All phases of the experiment."""
    cfg = ctx.config
    routes = Routes(cfg.cluster)
    baseline = production(routes, _job(cfg, _no_profile()))
    ctx.say(f"[bold]1/6[/] production placement: {baseline.describe()}")
    with reserve(baseline.placement) as held, _Roles(ctx, baseline, held) as roles:
        base = warm_start(ctx, roles)
        measured = {"production": measure_placement(ctx, roles, "production", baseline.describe(), base)}
        profile = profile_of(measured["production"], roles)
    exploration = explore_placements(ctx, _job(cfg, profile))
    best = exploration.best
    ctx.say(f"[bold]4/6[/] chosen placement: {best.describe()}")
    with reserve(best.placement) as held, _Roles(ctx, best, held) as roles:
        measured["chosen"] = measure_placement(ctx, roles, "chosen", best.describe(), base)
        before = evaluate_phase(ctx, roles, "before", base)
        train_phase(ctx, roles, base)
        after = evaluate_phase(ctx, roles, "after", None)
        roles_transcripts(ctx, roles)
        traffic = roles.rollout.call("traffic")[0]
    finish(ctx, exploration, measured, before, after, traffic)


# -- roles ---------------------------------------------------------------------------------------------------------


class _Roles:
    """Starts the actors of a plan, and stops them whatever happens."""

    def __init__(self, ctx: Context, plan: RlPlan, held: Any) -> None:
        self.ctx, self.plan, self.held = ctx, plan, held

    def __enter__(self) -> RayRoles:
        started = time.monotonic()
        network = Network(
            cluster=self.ctx.config.cluster,
            link_file=Path(tempfile.gettempdir()) / f"links-{self.ctx.tracker.run_id}-{self.plan.name}",
            learner=self.plan.learner,
            rollout=self.plan.rollout,
            comparison=self.plan.comparison,
            reduction=self.plan.reduction,
            weight_sync=self.plan.weight_sync,
        )
        self.link_file = network.link_file
        self.roles = RayRoles(self.ctx.config.train, network, self.held)
        self.ctx.say(f"    {sum(len(g) for g in self.roles.groups)} workers up in {time.monotonic() - started:.1f} s")
        return self.roles

    def __exit__(self, *error: object) -> None:
        self.roles.stop()
        self.link_file.unlink(missing_ok=True)


def _job(cfg: StratAcross, profile: RlProfile) -> RlJob:
    return RlJob(
        name=cfg.name,
        learner_ranks=cfg.job.learner_ranks,
        rollout_workers=cfg.job.rollout_workers,
        profile=profile,
    )


def _no_profile() -> RlProfile:
    """Production's placement does not depend on the profile; nothing is predicted from this."""
    return RlProfile(rollout_s=0, comparison_s=0, learner_s=0, trajectory_bytes=0, shard_bytes=0, parameters=0)


# -- phases --------------------------------------------------------------------------------------------------------


def warm_start(ctx: Context, roles: RayRoles) -> checkpoint.Checkpoint:
    """Supervised traces on all learner ranks; the result is checkpoint 0."""
    steps = ctx.config.train.warmstart.steps
    ctx.say(f"[bold]2/6[/] warm start: {steps} steps on traces of imperfect play, {len(roles.learner)} learner ranks")
    with ctx.tracker.child("warm_start") as run_id:
        for start in range(0, steps, WARM_CHUNK):
            stop = min(steps, start + WARM_CHUNK)
            losses = [
                statistics.fmean(of_step)
                for of_step in zip(*roles.learner.call("warm_start", start, stop), strict=True)
            ]
            for step, loss in enumerate(losses, start):
                ctx.tracker.metrics({"warm_start/loss": loss}, step, run_id)
            ctx.say(f"    step {stop}/{steps}: loss {losses[-1]:.3f}")
        roles.learner.call("use_as_reference")
        roles.sync_weights()
        tensors, meta = roles.state()
        folder = checkpoint.save(ctx.output / "checkpoints", 0, tensors, meta)
    return checkpoint.load(folder)


def measure_placement(
    ctx: Context, roles: RayRoles, name: str, plan_text: str, base: checkpoint.Checkpoint
) -> Measured:
    """The first training steps from the warm start, links off and on by turns; the first pair is left out."""
    ctx.say(f"[bold]{'3' if name == 'production' else '4'}/6[/] {name} placement, measured without and with links")
    roles.load_state(base.tensors, base.meta)
    records: dict[Mode, list[StepRecord]] = {"off": [], "calibrated-wait": []}
    with ctx.tracker.child(f"placement/{name}") as run_id:
        ctx.tracker.params({"plan": plan_text}, run_id)
        ctx.tracker.tags({"link_emulation": "off and calibrated-wait in turn"}, run_id)
        for step in range(2 * ctx.config.measure.pairs):
            # off on, on off, off on, ...: a trend over the steps cancels as well
            mode: Mode = "calibrated-wait" if step % 4 in (1, 2) else "off"
            roles.set_links(mode)
            records[mode] += train(roles, range(step, step + 1), lambda record: log_step(ctx, record, run_id))
    found = Measured(off=tuple(records["off"][1:]), on=tuple(records["calibrated-wait"][1:]))
    ctx.say(
        f"    {name}: {found.step_s:.2f} s a step with links, {found.compute_s:.2f} s without; the links add "
        f"{found.network_s:.2f} s (medians of {len(found.on)} pairs)"
    )
    return found


def profile_of(measured: Measured, roles: RayRoles) -> RlProfile:
    """Compute seconds and payloads of the steps without links: what the Explorer's prediction rests on."""
    records = measured.off
    seconds = {phase: statistics.median(r.seconds[phase] for r in records) for phase in records[0].seconds}
    return RlProfile(
        rollout_s=seconds["rollout"],
        comparison_s=seconds["comparison"],
        learner_s=seconds["learner"],
        sync_s=seconds["weight_sync"],
        trajectory_bytes=int(statistics.median(r.metrics["trajectory_bytes"] for r in records)),
        shard_bytes=int(statistics.median(r.metrics["shard_bytes"] for r in records)),
        parameters=roles.state()[0]["policy"].numel(),
    )


def explore_placements(ctx: Context, job: RlJob) -> RlExploration:
    """Search all placements and collectives, and show the outcome beside the baselines."""
    with ctx.tracker.child("exploration") as run_id:
        found = explore_rl(ctx.config.cluster, job)
        ctx.console.print(exploration_table(found))
        for plan in (*found.baselines, found.best):
            ctx.tracker.metrics({f"step_s/{plan.name}/predicted": plan.step.total_s}, run_id=run_id)
        ctx.tracker.metrics(
            {"gap": found.gap, "plans_priced": found.plans_priced, "runtime_s": found.runtime_s}, run_id=run_id
        )
        ctx.tracker.text(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False), "job.yaml", run_id)
        ctx.tracker.text(yaml.safe_dump(found.best.to_dict(), sort_keys=False), "plan.yaml")
        ctx.tracker.text(yaml.safe_dump(found.baselines[0].to_dict(), sort_keys=False), "plan_production.yaml")
        return found


def log_step(ctx: Context, record: StepRecord, run_id: str) -> None:
    """Send a step's seconds and statistics to MLflow."""
    seconds = {f"seconds/{phase}": value for phase, value in record.seconds.items()}
    ctx.tracker.metrics({**record.metrics, **seconds, "seconds/step": record.total_s}, record.step, run_id)


def train_phase(ctx: Context, roles: RayRoles, base: checkpoint.Checkpoint) -> None:
    """All training steps under the chosen placement, links on, with checkpoints."""
    steps = ctx.config.train.steps
    ctx.say(
        f"[bold]5/6[/] training: {steps} steps of {ctx.config.train.advantage.estimator} on {ctx.config.train.game}"
    )
    roles.load_state(base.tensors, base.meta)
    roles.set_links("calibrated-wait")
    with ctx.tracker.child("training") as run_id:

        def on_step(record: StepRecord) -> None:
            log_step(ctx, record, run_id)
            done, m = record.step + 1, record.metrics
            if done % 10 == 0 or done == steps:
                ctx.say(
                    f"    step {done}/{steps}: {record.total_s:.2f} s, kl {m['train/kl']:.3f}, "
                    f"scores a/b/c {m['score/a']:.2f}/{m['score/b']:.2f}/{m['score/c']:.2f}, "
                    f"malformed {m['rollout/malformed']:.1%}"
                )
                checkpoint.save(ctx.output / "checkpoints", done, *roles.state())

        train(roles, range(steps), on_step)
        ctx.tracker.files(ctx.output / "checkpoints" / f"step-{steps:06d}", "checkpoint")


def evaluate_phase(ctx: Context, roles: RayRoles, when: str, base: checkpoint.Checkpoint | None) -> Evaluation:
    """Policy table, exact values and played games of the current weights (or of `base`)."""
    ctx.say(f"[bold]{'5' if when == 'before' else '6'}/6[/] evaluation {when} training")
    if base is not None:
        roles.load_state(base.tensors, base.meta)
    with ctx.tracker.child(f"evaluation/{when}") as run_id:
        e = ctx.config.evaluate
        result = evaluate(roles, ctx.config.train, e.table_samples, e.games)
        ctx.tracker.metrics(result.metrics(), run_id=run_id)
    return result


def roles_transcripts(ctx: Context, roles: RayRoles) -> None:
    """Some games with all that both players wrote, as an artifact."""
    games = roles.rollout.call("sample_transcripts", 8, ctx.config.train.seed)[0]
    ctx.tracker.text("\n\n".join(games), "transcripts.txt")


def finish(
    ctx: Context,
    exploration: RlExploration,
    measured: dict[str, Measured],
    before: Evaluation,
    after: Evaluation,
    traffic: dict[str, dict[str, int]],
) -> None:
    """Headline metrics on the parent run, and the closing table."""
    plans = {"production": exploration.baselines[0], "chosen": exploration.best}
    compute_s = statistics.median(r.total_s for found in measured.values() for r in found.off)
    even_s = {name: compute_s + found.network_s for name, found in measured.items()}
    headline = {
        "speedup/predicted": plans["production"].step.total_s / plans["chosen"].step.total_s - 1,
        "speedup/measured": even_s["production"] / even_s["chosen"] - 1,
        "speedup/measured_raw": measured["production"].step_s / measured["chosen"].step_s - 1,
    }
    for name, plan in plans.items():
        headline |= {
            f"step_s/{name}/predicted": plan.step.total_s,
            f"step_s/{name}/measured": measured[name].step_s,
            f"network_s/{name}/predicted": plan.step.network_s,
            f"network_s/{name}/measured": measured[name].network_s,
            f"compute_s/{name}/measured": measured[name].compute_s,
        }
    change = gains(before, after, ctx.config.train)
    for name, interval in change.items():
        headline |= {
            f"gain/{name}": interval.value,
            f"gain/{name}_low": interval.low,
            f"gain/{name}_high": interval.high,
        }
    headline |= after.metrics()
    headline |= {f"link_bytes/{link}": float(count["bytes"]) for link, count in traffic_names(traffic).items()}
    ctx.tracker.metrics(headline)
    ctx.console.print(plans_table(headline))
    ctx.console.print(games_table(before, after, change))
    ctx.say(f"MLflow run {ctx.tracker.run_id} of experiment {EXPERIMENT!r}; open it with: [bold]make ui[/]")


def traffic_names(traffic: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """MLflow refuses `>` in names: `a->b` becomes `a_to_b`."""
    return {name.replace("->", "_to_"): count for name, count in traffic.items()}


# -- command line --------------------------------------------------------------------------------------------------


def main(
    config_file: Annotated[Path, typer.Option("--config", help="YAML file; see experiments/configs/demo.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value over the file, e.g. --set train.steps=20; repeatable")
    ] = None,
) -> None:
    """Place an RL job over sites, measure the placement against production, and train Strat-Reasoner there.

    Example: python experiments/strat_across.py --config experiments/configs/demo.yaml --set train.seed=3
    """
    console = Console(width=120, force_terminal=sys.stdout.isatty())
    try:
        run_file(config_file, overrides or [], console)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def run_file(config_file: Path, overrides: Sequence[str], console: Console) -> None:
    """Read the configuration, connect, and run under one parent MLflow run."""
    cfg = config.load(config_file, StratAcross, overrides)
    uri, address = os.environ.get("MLFLOW_TRACKING_URI"), os.environ.get("RAY_ADDRESS")
    if not uri or not address:
        raise ConfigError(
            f"{'MLFLOW_TRACKING_URI' if not uri else 'RAY_ADDRESS'} is not set: run `make up`, then submit this script "
            "with the command that it prints (or `make demo` for everything at once)"
        )
    ray.init(address=address, log_to_driver=True, logging_level="WARNING")
    tags = {"config": str(config_file), "seed": str(cfg.train.seed), "link_emulation": "calibrated-wait"}
    if os.environ.get("STRATACROSS_COMMIT"):
        tags["commit"] = os.environ["STRATACROSS_COMMIT"]
    tracker = Tracker(uri, EXPERIMENT, cfg.name, tags)
    output = Path(os.environ.get("STRATACROSS_OUTPUT", tempfile.gettempdir())) / tracker.run_id
    status = "FAILED"
    try:
        tracker.params(cfg.model_dump(mode="json", exclude={"cluster"}))
        tracker.text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False), "config.yaml")
        tracker.text(yaml.safe_dump(cfg.cluster.model_dump(mode="json"), sort_keys=False), "cluster.yaml")
        run(Context(cfg, tracker, console, output))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        lost = tracker.close(status)
        if lost:
            print(f"warning: {lost} values could not be sent to MLflow at {uri}", file=sys.stderr, flush=True)
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
