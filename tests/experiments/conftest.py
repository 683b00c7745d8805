"""Running `experiments/session.py` as a user does, and seeing what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "session.py"


@pytest.fixture(scope="session")
def session() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script with arguments to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    return run


@pytest.fixture(scope="session")
def our_processes() -> Callable[[Path], list[str]]:
    """Command lines of processes that name the run folder, or a Ray cluster of ours."""

    def find(run_dir: Path) -> list[str]:
        lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        return [line for line in lines if str(run_dir) in line and "pytest" not in line]

    return find
