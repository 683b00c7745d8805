"""The command `scale-across trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from common import config
from common.config import ConfigError
from scale_across.estimate import Setup, TrainingJob
from scale_across.model_presets import load_model
from scale_across.overlap import OverlapPolicy
from scale_across.parallelism import ORDER, RECOMPUTE, describe, from_mapping
from scale_across.topology import Topology

_PARTS = {
    "compute_s": "compute, busiest stage",
    "gather_s": "waiting for parameters",
    "idle_s": "idle: fill, drain, messages",
    "reduce_s": "gradient reduction after the last block",
    "optimizer_s": "optimizer",
}


def trace(
    model: Annotated[str, typer.Argument(help="a preset (llama-3.1-405b) or a Hugging Face config.json")],
    cluster: Annotated[str, typer.Argument(help="a cluster.yaml or a preset (llama3-24k, meta-region)")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON trace for ui.perfetto.dev")] = None,
    gantt: Annotated[Path | None, typer.Option(help="chart: .png, .svg or .pdf")] = None,
    until: Annotated[float | None, typer.Option(help="end of the chart in seconds")] = None,
    since: Annotated[float, typer.Option(help="start of the chart in seconds")] = 0.0,
    tp: Annotated[int, typer.Option(help="tensor parallelism")] = 1,
    cp: Annotated[int, typer.Option(help="context parallelism")] = 1,
    ep: Annotated[int, typer.Option(help="expert parallelism")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline stages")] = 1,
    dp: Annotated[int, typer.Option(help="data parallelism; 0 fills the cluster")] = 0,
    chunks: Annotated[int, typer.Option(help="model chunks per stage (interleaving)")] = 1,
    microbatch: Annotated[int, typer.Option(help="sequences per microbatch")] = 1,
    zero: Annotated[int, typer.Option(help="0 replicated, 1 optimizer, 2 gradients, 3 parameters sharded")] = 1,
    recompute: Annotated[str, typer.Option(help=", ".join(RECOMPUTE))] = "none",
    outermost: Annotated[str, typer.Option(help="axis that crosses sites: " + " or ".join(ORDER))] = "dp",
    hierarchical: Annotated[bool, typer.Option("--hierarchical", help="reduce gradients level by level")] = False,
    global_batch: Annotated[int, typer.Option(help="sequences per step")] = 1024,
    seq_len: Annotated[int, typer.Option(help="tokens per sequence")] = 8192,
    stack: Annotated[str, typer.Option(help="software stack, or a YAML file")] = "megatron-2024",
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="key=value of " + ", ".join(OverlapPolicy.model_fields))
    ] = None,
) -> None:
    """Simulate one training step and draw where its time goes: a trace for Perfetto, a chart for a report.

    Example: scale-across trace llama-3.1-405b llama3-24k --tp 8 --pp 16 --dp 8 --chunks 8 --global-batch 256
    -o trace.json --gantt step.png --policy buckets=4
    """
    from scale_across.simulate import simulate
    from scale_across.simulate_input import candidate
    from scale_across.trace import write_gantt, write_trace

    shape, topology = load_model(model), Topology.load(cluster)
    values = {"model": model, "global_batch": global_batch, "seq_len": seq_len, "stack": stack}
    job = config.validate(TrainingJob, values, where="options")
    filled = max(1, topology.spec.gpus // (max(1, tp) * max(1, cp) * max(1, pp)))
    plan = from_mapping(
        {
            "tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp or filled, "chunks": chunks, "microbatch": microbatch,
            "zero": zero, "recompute": recompute, "sp": int(tp > 1), "order": outermost,
            "reduction": int(hierarchical),
        }
    )  # fmt: skip
    setup = Setup.of(shape, topology, job)
    setup.check(plan, topology.spec.gpus)
    order, work, chosen = candidate(setup, plan)
    chosen = config.validate(OverlapPolicy, config.apply_overrides(chosen.model_dump(), policy or []), where="--policy")
    if until is not None and until <= since:
        raise ConfigError(f"--until {until}: must be greater than --since {since}")
    timeline = simulate(order, work, chosen)
    table = Table(title=f"One step, simulated: {timeline.step_s:.3f} s ({describe(plan)})", title_justify="left")
    for column in ("part", "seconds", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for key, seconds in timeline.parts().items():
        table.add_row(_PARTS[key], f"{seconds:.3f}", f"{seconds / timeline.step_s:.1%}")
    table.add_section()
    table.add_row("closed form (scale-across predict)", f"{setup.estimate(plan).total_s:.3f}", "")
    Console().print(table)
    if output:
        write_trace(timeline, output)
        Console().print(f"{output}: open it at https://ui.perfetto.dev", soft_wrap=True)
    if gantt:
        write_gantt(timeline, gantt, (since, until if until is not None else timeline.step_s))
        Console().print(f"{gantt}", soft_wrap=True)
