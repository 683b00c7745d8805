"""The import rules of docs/design.md, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def imports(package: str, top_level_only: bool = False) -> dict[str, set[str]]:
    """File → root names (and `common.x`) that it imports; top level only, or anywhere."""
    found = {}
    for file in (PACKAGES / package / "src" / package).rglob("*.py"):
        tree = ast.parse(file.read_text())
        nodes = tree.body if top_level_only else ast.walk(tree)
        names: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[str(file.relative_to(PACKAGES))] = names
    assert found
    return found


def offenders(package: str, forbidden: tuple[str, ...], top_level_only: bool = False) -> list[str]:
    return [
        f"{file}: {name}"
        for file, names in imports(package, top_level_only).items()
        for name in names
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("scale_across", ("torch", "ray", "mlflow", "transformers", "strat_reasoner")),
        ("strat_reasoner", ("scale_across",)),
        ("common", ("scale_across", "strat_reasoner")),
    ],
)
def test_who_may_import_whom(package: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(package, forbidden) == []


def test_the_explorer_uses_only_the_light_part_of_common() -> None:
    light = {"common.config", "common.spec", "common.messages"}
    used = {n for names in imports("scale_across").values() for n in names if n.startswith("common.")}
    assert {".".join(name.split(".")[:2]) for name in used} <= light


def test_the_explorer_starts_without_heavy_libraries() -> None:
    heavy = ["torch", "ray", "mlflow", "transformers", "matplotlib", "ortools"]
    code = f"import sys, scale_across.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
