"""Run benchmarks, each in a process of its own, and write rows to benchmarks/results, tables to docs/benchmarks.md.

`python -m benchmarks` runs all; `python -m benchmarks overlap --quick` runs one, and leaves other figures as they are.
`python -m benchmarks inference --part resnet50-2` runs a part of one, and leaves the rows of other cases as they are.
`python -m benchmarks --page` only writes the page anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.grid.picture import picture
from benchmarks.page import FOLDER, Run, page, read_run, write_run
from benchmarks.report import Row

PAGE = FOLDER.parent / "docs" / "benchmarks.md"
PICTURES = {"overlap": picture}
"""Benchmarks whose rows are drawn, too: beside the page, under their name."""
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
NOT_BENCHMARKS = {"__init__", "__main__", "page", "report"}


def names() -> list[str]:
    """All benchmarks of this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def run(name: str, options: Sequence[str]) -> list[Row]:
    """Run one benchmark, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", file, *options], check=True)
        return [Row(**each) for each in json.loads(file.read_text())]


def refresh(name: str, options: Sequence[str]) -> None:
    """Run one benchmark, and write its rows and its picture."""
    rows = run(name, options)
    write_run(name, Run(command=" ".join(["python -m", f"benchmarks.{name}", *options]), machine=machine(), rows=rows))
    if name in PICTURES:
        PAGE.with_name(f"{name}.svg").write_text(PICTURES[name](rows))


def refresh_parts(name: str, parts: Sequence[str], options: Sequence[str]) -> None:
    """Run parts of a benchmark, and write their rows in place of those of the same cases."""
    rows = run(name, [*parts, *options])
    measured, before = [each.case for each in rows], read_run(name)
    kept = [each for each in before.rows if each.case not in measured]
    write_run(name, replace(before, machine=machine(), rows=[*kept, *rows]))


def machine() -> str:
    """Return in words what figures depend on; those of remote calls also on how TCP avoids congestion."""
    known = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{known}, TCP {CONGESTION_CONTROL.read_text().strip()}" if CONGESTION_CONTROL.exists() else known


def main() -> None:
    """Refresh the figures asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all, if none is given")
    parser.add_argument("--quick", action="store_true", help="end within a minute each")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page of the rows that are there")
    parser.add_argument("--part", action="append", default=[], help="measure this part alone of the benchmark named")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    quick = ["--quick"] if options.quick else []
    if options.part and len(options.names) != 1:
        parser.error("parts are of one benchmark")
    for name in [] if options.page else options.names or names():
        if options.part:
            refresh_parts(name, options.part, quick)
        else:
            refresh(name, quick)
        PAGE.write_text(page(PICTURES))
    if options.page:
        PAGE.write_text(page(PICTURES))


if __name__ == "__main__":
    main()
