"""Make docs/figures/mlflow_compare.png: MLflow's comparison of the newest main runs, in headless Chromium.

python experiments/screenshot.py            # after two or more `make demo`; needs Debian's package `chromium`
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer
from mlflow.tracking import MlflowClient

from common import tracking
from common.config import ConfigError
from session import ROOT, RUN_DIR, RunDirOption

OUTPUT = ROOT / "docs" / "figures" / "mlflow_compare.png"
BROWSER_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
)


def main(
    run_dir: RunDirOption = RUN_DIR,
    output: Annotated[Path, typer.Option("--output", help="PNG to write")] = OUTPUT,
    runs: Annotated[int, typer.Option("--runs", help="how many of the newest runs")] = 2,
    size: Annotated[str, typer.Option("--size", help="width,height in pixels")] = "1500,1250",
) -> None:
    """Photograph MLflow's page that compares the newest main runs."""
    try:
        photograph(run_dir.resolve(), output, runs, size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def photograph(run_dir: Path, output: Path, runs: int, size: str) -> None:
    """Start the server, open the comparison, write the picture."""
    browser = shutil.which("chromium")
    if browser is None:
        raise ConfigError("chromium is not installed: apt-get install chromium")
    server = tracking.start_server(run_dir / "mlflow")
    try:
        url = comparison_url(server.url, runs)
        with tempfile.TemporaryDirectory() as profile:
            command = [browser, *BROWSER_OPTIONS.split(), f"--user-data-dir={profile}", f"--window-size={size}"]
            command += ["--virtual-time-budget=30000", f"--screenshot={output}", url]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    finally:
        tracking.stop_server(run_dir / "mlflow")
    print(output)


def comparison_url(server: str, runs: int) -> str:
    """MLflow's page for the newest finished parent runs."""
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("stratacross")
    if experiment is None:
        raise ConfigError("no main run is recorded here yet; run `make demo` first")
    found = client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'")
    parents = [run.info.run_id for run in found if "mlflow.parentRunId" not in run.data.tags][:runs]
    if len(parents) < runs:
        raise ConfigError(f"{len(parents)} finished main runs are recorded, {runs} are wanted; run `make demo` again")
    query = urllib.parse.urlencode({"runs": json.dumps(parents), "experiments": json.dumps([experiment.experiment_id])})
    return f"{server}/#/compare-runs?{query}"


if __name__ == "__main__":
    typer.run(main)
