"""Make docs/figures/mlflow_compare.png: MLflow's charts of the recorded main runs, in headless Chromium.

python experiments/screenshot.py     # after two or more `make demo`; needs Debian's chromium and chromium-driver
"""

from __future__ import annotations

import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from mlflow.tracking import MlflowClient
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions as ready
from selenium.webdriver.support.wait import WebDriverWait

from common import tracking
from common.config import ConfigError
from session import ROOT, RUN_DIR, RunDirOption

WAIT_S = 60
OUTPUT = ROOT / "docs" / "figures" / "mlflow_compare.png"
BROWSER_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def main(
    run_dir: RunDirOption = RUN_DIR,
    output: Annotated[Path, typer.Option("--output", help="PNG to write")] = OUTPUT,
    charts: Annotated[str, typer.Option("--charts", help="regular expression over metric names")] = "speedup|win_rate",
    size: Annotated[str, typer.Option("--size", help="width,height in pixels")] = "1500,1500",
) -> None:
    """Photograph MLflow's page that compares the recorded main runs."""
    try:
        photograph(run_dir.resolve(), output, charts, size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def photograph(run_dir: Path, output: Path, charts: str, size: str) -> None:
    """Start the server, open the charts of all finished main runs, show those that match, write the picture."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise ConfigError("chromium or chromedriver is missing: apt-get install chromium chromium-driver")
    server = tracking.start_server(run_dir / "mlflow")
    try:
        with _page(browser, driver, size) as page:
            page.get(charts_url(server.url))
            _close_assistant(page)
            search = WebDriverWait(page, WAIT_S).until(
                ready.element_to_be_clickable((By.CSS_SELECTOR, "input[placeholder='Search metric charts']"))
            )
            search.send_keys(charts)
            WebDriverWait(page, WAIT_S).until(lambda p: len(p.find_elements(By.CSS_SELECTOR, ".barlayer .point")) > 0)
            ActionChains(page).move_to_element(search).pause(3).perform()  # away from the charts, and let all draw
            page.save_screenshot(str(output))
    finally:
        tracking.stop_server(run_dir / "mlflow")
    print(output)


@contextmanager
def _page(browser: str, driver: str, size: str) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in BROWSER_OPTIONS:
        options.add_argument(option)
    options.add_argument(f"--window-size={size}")
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield page
    finally:
        page.quit()


def _close_assistant(page: webdriver.Chrome) -> None:
    """MLflow opens its assistant beside the page; it would take a quarter of the picture."""
    with suppress(TimeoutException):
        WebDriverWait(page, 10).until(
            ready.element_to_be_clickable((By.CSS_SELECTOR, "button[aria-label='Close']"))
        ).click()


def charts_url(server: str) -> str:
    """MLflow's chart view of the finished runs of the main experiment."""
    experiment = MlflowClient(server).get_experiment_by_name("stratacross")
    if experiment is None:
        raise ConfigError("no main run is recorded here yet; run `make demo` first")
    chosen = urllib.parse.quote("attributes.status = 'FINISHED'")
    return f"{server}/#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART&searchFilter={chosen}"


if __name__ == "__main__":
    typer.run(main)
