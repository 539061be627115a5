"""The example with servers of its own runs with one command, and needs nothing but torch and fxlib."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_an_example_imports_torch_fxlib_and_python_s_own(file: Path) -> None:
    roots = {name.split(".")[0] for name in imported(file)}
    assert roots - sys.stdlib_module_names - {"__future__"} <= {"torch", "fxlib", "examples"}


def test_servers_of_one_s_own_use_the_public_names_alone() -> None:
    files = list((ROOT / "examples" / "own_servers").glob("*.py"))
    assert {name for file in files for name in imported(file) if name.startswith("fxlib")} == {"fxlib"}
    assert not [file for file in files if "fxlib.ps" in file.read_text() or "ps.lookup" in file.read_text()]


@pytest.mark.cluster
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_it_runs_with_one_command_and_adopts_the_faster_module() -> None:
    command = [sys.executable, "-m", "examples.own_servers.train"]
    ran = subprocess.run(
        command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout
    assert "ADOPT the rewritten module" in ran.stdout
    assert "trained 8 steps" in ran.stdout
