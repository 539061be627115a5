"""The page of figures is made of the rows beside the benchmarks, and shows each of them."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import PAGE, PICTURES, names
from benchmarks.page import RESULTS, page, read_run, tables
from benchmarks.report import Case, Row


def measured(case: Case, arm: str, metric: str, value: float) -> Row:
    return Row(benchmark="b", case=case, arm=arm, metric=metric, value=value, unit="s", low=value, high=value, runs=3)


@pytest.mark.slow
def test_the_page_is_what_the_rows_give() -> None:
    assert PAGE.read_text() == page(PICTURES), "run: python -m benchmarks --page"


def test_results_are_of_benchmarks_that_there_are() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= {*names(), "programs"}


def test_every_row_is_one_figure_of_the_tables() -> None:
    for path in RESULTS.glob("*.json"):
        rows = read_run(path.stem).rows
        figures = {(*row.case.items(), row.arm, row.metric) for row in rows}  # a summary may repeat the row of a cell
        shown = [value for part in tables(rows) for value in values(part)]
        assert len(shown) == len(figures), path.stem


def values(table: str) -> list[str]:
    """Return the figures of a table: its columns that are aligned to the right."""
    _, marks, *lines = ([each.strip() for each in line[1:-1].split(" | ")] for line in table.splitlines())
    return [each for line in lines for each, mark in zip(line, marks, strict=True) if mark == "---:" and each]


def test_arms_of_a_metric_stand_side_by_side_and_a_case_with_fewer_has_gaps() -> None:
    small: Case = {"lookups": 8}
    large: Case = {"lookups": 26}
    rows = [
        measured(small, "blocking", "step", 2.0),
        measured(small, "blocking", "memory", 5.0),
        measured(small, "fxlib", "step", 1.0),
        measured(large, "blocking", "step", 3.0),
    ]
    [table] = tables(rows)
    assert table.splitlines() == [
        "| lookups | blocking step (s) | fxlib step (s) | blocking memory (s) |",
        "| --- | ---: | ---: | ---: |",
        "| 8 | 2 | 1 | 5 |",
        "| 26 | 3 |  |  |",
    ]


def test_a_text_does_not_end_its_cell() -> None:
    [table] = tables([measured({"why": "a|b <c>"}, "fxlib", "captured", 0.0)])
    assert table.splitlines()[2] == "| a\\|b &lt;c> | 0 |"
