"""Run benchmarks, each in a process of its own, and write their tables to docs/benchmarks.md.

`python -m benchmarks` runs all; `python -m benchmarks overlap --quick` runs one, and leaves other tables as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.grid.picture import picture
from benchmarks.report import Row, line

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PICTURES = {"overlap": picture}
"""Benchmarks whose rows are drawn, too: beside the page, under their name."""
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
NOT_BENCHMARKS = {"__init__", "__main__", "report"}
HEADER = """# Benchmarks

Written by `make bench`. Medians with 95% intervals; the arms of a case are interleaved in one run, so compare within a
case, not across machines.
"""
SECTION = """## {name}

{about}

`{command}`, on {machine}

{picture}```
{rows}
```
"""


def names() -> list[str]:
    """All benchmarks of this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def run(name: str, options: Sequence[str]) -> list[Row]:
    """Run one benchmark, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", file, *options], check=True)
        return [Row(**each) for each in json.loads(file.read_text())]


def section(name: str, options: Sequence[str]) -> str:
    """Run one benchmark, and return its table under the command that made it."""
    rows = run(name, options)
    if name in PICTURES:
        PAGE.with_name(f"{name}.svg").write_text(PICTURES[name](rows))
    return SECTION.format(
        name=name,
        about=ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())),
        picture=f"![{name}]({name}.svg)\n\n" if name in PICTURES else "",
        command=" ".join(["python -m", f"benchmarks.{name}", *options]),
        machine=machine(),
        rows="\n".join(map(line, rows)),
    )


def machine() -> str:
    """Return in words what figures depend on; those of remote calls also on how TCP avoids congestion."""
    known = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{known}, TCP {CONGESTION_CONTROL.read_text().strip()}" if CONGESTION_CONTROL.exists() else known


def written() -> dict[str, str]:
    """Return the tables of the page as it is, by name."""
    text = PAGE.read_text() if PAGE.exists() else ""
    return {part.split("\n", 1)[0]: f"## {part}" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def main() -> None:
    """Refresh the tables asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all, if none is given")
    parser.add_argument("--quick", action="store_true", help="end within a minute each")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in options.names or names():
        sections = written() | {name: section(name, ["--quick"] if options.quick else [])}
        PAGE.write_text("\n".join([HEADER, *(sections[each].strip() + "\n" for each in sorted(sections))]))


if __name__ == "__main__":
    main()
