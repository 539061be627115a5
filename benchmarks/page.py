"""The page of figures: tables of medians, made of the rows that each benchmark's last run left in `results/`."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Case, Row

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
COLUMNS = 6
"""Number of figures in a line of a table; what has more is divided into several tables."""
HEADER = """# Benchmarks

Medians, as the last run of each benchmark left them; `make bench` runs them all and writes this page. The rows with
their 95% intervals are in `benchmarks/results`. The arms of a case are interleaved in one run: compare them within a
case, not across machines.
"""

Column = tuple[str, str, str]
"""A figure's arm, metric and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a benchmark: the command, the machine, what a reader has to know besides, and its rows."""

    command: str
    machine: str
    note: str = ""
    rows: Sequence[Row]


def write_run(name: str, run: Run) -> None:
    """Write a run as JSON, one row to a line."""
    told = {key: value for key, value in asdict(run).items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(asdict(row)) for row in run.rows)
    text = json.dumps(told, indent=1).removesuffix("\n}")
    (RESULTS / f"{name}.json").write_text(f'{text},\n "rows": [\n  {rows}\n ]\n}}\n')


def read_run(name: str) -> Run:
    """Read the last run of a benchmark."""
    told = json.loads((RESULTS / f"{name}.json").read_text())
    return Run(**told | {"rows": [Row(**each) for each in told["rows"]]})


def page(pictures: Collection[str]) -> str:
    """Return the whole page; benchmarks that are in `pictures` have an SVG of their name beside it."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return "\n".join([HEADER, *(section(name, read_run(name), picture=name in pictures) for name in names)])


def section(name: str, run: Run, *, picture: bool) -> str:
    """Return one benchmark's part of the page."""
    parts = [f"## {name}", about(name), f"`{run.command}`, on {run.machine}"]
    parts += [run.note] * bool(run.note)
    parts += [f"![{name}]({name}.svg)"] * picture
    return "\n\n".join([*parts, *tables(run.rows)]) + "\n"


def about(name: str) -> str:
    """Return what a benchmark says of itself."""
    file = FOLDER / f"{name}.py"
    source = file if file.exists() else FOLDER / name / "__main__.py"
    return ast.get_docstring(ast.parse(source.read_text())) or ""


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield tables with a line for each case, so that a table's cases have the same figures, or fewer."""
    cases: dict[tuple[tuple[str, object], ...], dict[Column, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.case.items()), {})[row.arm, row.metric, row.unit] = row
    kinds: list[frozenset[Column]] = sorted(
        dict.fromkeys(frozenset(figures) for figures in cases.values()), key=len, reverse=True
    )  # of equal length, the first first: a set has another order in each process
    while kinds:
        columns = kinds[0]
        found = [figures for figures in cases.values() if columns >= figures.keys() and frozenset(figures) in kinds]
        kinds = [each for each in kinds if not columns >= each]
        # by metric, so that arms stand side by side
        ordered = sorted(columns, key=[(row.arm, row.metric, row.unit) for row in rows].index)
        metrics = list(dict.fromkeys(metric for _, metric, _ in ordered))
        ordered.sort(key=lambda column: metrics.index(column[1]))
        for first in range(0, len(ordered), COLUMNS):
            part = ordered[first : first + COLUMNS]
            if lines := [figures for figures in found if figures.keys() & set(part)]:
                yield table(lines, part)


def table(lines: Sequence[dict[Column, Row]], columns: Sequence[Column]) -> str:
    """Return one table of Markdown."""
    cases: list[Case] = [next(iter(figures.values())).case for figures in lines]
    keys = list(dict.fromkeys(key for case in cases for key in case))
    heads = [f"{arm} {metric}" + (f" ({unit})" if unit else "") for arm, metric, unit in columns]
    text = [[*keys, *heads], [*["---"] * len(keys), *["---:"] * len(heads)]]
    text += [
        [
            *(str(case.get(key, "")) for key in keys),
            *(f"{figures[column].value:.4g}" if column in figures else "" for column in columns),
        ]
        for case, figures in zip(cases, lines, strict=True)
    ]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in text)


def cell(text: str) -> str:
    """Return a text as it stands in a cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")
