"""Run every benchmark, each in a process of its own, and write their tables to docs/benchmarks.md."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.report import Row, line

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEADER = """# Benchmarks

Written by `make bench`. Medians with 95% bootstrap intervals; the arms of a case are interleaved in one run, so compare
within a case, not across machines. Machine: {machine}.
"""
NOT_BENCHMARKS = {"__init__", "__main__", "programs", "report"}


def names() -> list[str]:
    """All benchmarks of this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def run(name: str, options: Sequence[str]) -> list[Row]:
    """Run one benchmark, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", file, *options], check=True)
        return [Row(**each) for each in json.loads(file.read_text())]


def page(results: dict[str, list[Row]]) -> str:
    """Return all rows as one page of tables, each under the command that made it."""
    machine = (
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    parts = [HEADER.format(machine=machine)]
    for name, rows in results.items():
        parts.append(f"## {name}\n\n`python -m benchmarks.{name}`\n\n```\n" + "\n".join(map(line, rows)) + "\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page({name: run(name, sys.argv[1:]) for name in names()}))
