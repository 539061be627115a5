"""What `benchmarks.overlap` makes of its measurements, and that its arms are what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync

import fxlib
from benchmarks.grid import paper
from benchmarks.grid.cells import BOUND, GRID, MIDDLE, PARTS, QUICK_CELLS, Cell
from benchmarks.grid.figures import rows, summary
from benchmarks.grid.measure import Measured
from benchmarks.grid.picture import picture
from benchmarks.report import Row
from fxlib import ps
from fxlib.runtime import is_issue, is_wait

STEPS_S = {
    "blocking": 0.1,
    "paper": 0.06,
    "fxlib": 0.02,
    "hand": 0.02,
    "pipeline": 0.016,
    "hand_pipeline": 0.016,
    "compute": 0.01,
}


def cell_of(steps_s: Mapping[str, float], cell: Cell = MIDDLE) -> Measured:
    """Measurements without noise."""
    return Measured(
        cell=cell,
        step_s={arm: [each] * 5 for arm, each in {**STEPS_S, **steps_s}.items()},
        hand="single",
        predicted_s={},
        bound_s={"bound": 0.01, "pipeline_bound": 0.012},
        limits={"bound": "compute", "pipeline_bound": "conflicts"},
    )


def figure(found: list[Row], arm: str, metric: str) -> Row:
    """The one row of an arm and a metric."""
    (row,) = [each for each in found if (each.arm, each.metric) == (arm, metric)]
    return row


def test_the_headroom_is_what_lies_between_blocking_and_compute() -> None:
    found = rows(cell_of({}))
    shares = [figure(found, arm, "headroom_share").value for arm in ("paper", "fxlib", "hand")]
    assert shares == pytest.approx([4 / 9, 8 / 9, 8 / 9])
    assert figure(found, "fxlib", "speedup").value == pytest.approx(5.0)
    assert figure(found, "fxlib", "ratio_to_hand").value == pytest.approx(1.0)


def test_across_the_step_the_share_is_of_what_lies_between_the_step_by_itself_and_the_bound_of_a_loop() -> None:
    found = rows(cell_of({"fxlib": 0.020, "pipeline": 0.014}))
    assert figure(found, "pipeline", "share_to_bound").value == pytest.approx(6 / 8)
    assert figure(found, "hand_pipeline", "share_to_bound").value == pytest.approx(4 / 8), "beside the same bound"
    assert figure(found, "pipeline_bound", "step_seconds").value == 0.012
    assert {each.case["limited_by"] for each in found} == {"compute"}


def test_an_interval_holds_the_share_of_noisy_rounds() -> None:
    noisy = Measured(
        cell=MIDDLE,
        step_s={arm: [each * (1 + 0.02 * place) for place in range(-3, 4)] for arm, each in STEPS_S.items()},
        hand="single",
        predicted_s={},
        bound_s={"bound": 0.01, "pipeline_bound": 0.012},
        limits={"bound": "compute", "pipeline_bound": "conflicts"},
    )
    share = figure(rows(noisy), "fxlib", "headroom_share")
    assert share.low <= share.value <= share.high
    assert share.low < 8 / 9 < share.high or share.value == pytest.approx(8 / 9)


def test_the_summary_counts_the_cells_that_fall_short_and_lists_them() -> None:
    good, behind = cell_of({}), cell_of({"fxlib": 0.03}, Cell(lookups=8, service_ms=2.0, hidden=256))
    slow = cell_of({"fxlib": 0.11, "hand": 0.11}, Cell(lookups=8, service_ms=0.0, hidden=256))
    found = summary([row for each in (good, behind, slow) for row in rows(each)])
    assert figure(found, "fxlib", "cells_below_hand").value == 1
    assert figure(found, "fxlib", "cells_slower_than_blocking").value == 1
    assert [each.case for each in found if each.metric == "ratio_to_hand"] == [behind.case]
    assert [each.case for each in found if each.metric == "speedup"] == [slow.case]
    assert figure(found, "fxlib", "median_headroom_share").value == pytest.approx(7 / 9)


def test_the_summary_counts_the_cells_in_which_reading_ahead_falls_short() -> None:
    good, behind = cell_of({}), cell_of({"hand_pipeline": 0.012}, Cell(lookups=8, service_ms=2.0, hidden=256))
    slow = cell_of({"pipeline": 0.03, "hand_pipeline": 0.03}, Cell(lookups=8, service_ms=0.0, hidden=256))
    found = summary([row for each in (good, behind, slow) for row in rows(each)])
    assert figure(found, "pipeline", "cells_below_hand_pipeline").value == 1
    assert figure(found, "pipeline", "cells_slower_than_within_the_step").value == 1
    assert figure(found, "pipeline", "median_speedup_across_the_step").value == pytest.approx(1.25)
    assert figure(found, "pipeline", "median_share_to_bound").value == pytest.approx(4 / 8)
    assert figure(found, "hand_pipeline", "median_share_to_bound").value == pytest.approx(4 / 8)


def test_rows_of_memory_are_of_no_cell() -> None:
    memory = Row(
        benchmark="overlap", case={"limit": "none"}, arm="fxlib", metric="peak_memory", value=1.0, unit="MiB", low=1.0,
        high=1.0, runs=1,
    )  # fmt: skip
    assert summary([*rows(cell_of({})), memory]) == summary(rows(cell_of({})))


def test_slack_covers_two_hundredths_and_no_more() -> None:
    within, beyond = cell_of({"fxlib": 0.0203}), cell_of({"fxlib": 0.0205})
    counts = [figure(summary(rows(each)), "fxlib", "cells_below_hand").value for each in (within, beyond)]
    assert counts == [0, 1]


def test_every_cell_is_measured_once_and_the_quick_ones_are_among_the_kinds() -> None:
    cells = [cell for part in PARTS.values() for cell in part]
    assert len(set(cells)) == len(cells)
    assert {GRID[0], *QUICK_CELLS} <= set(cells)
    assert {cell.mode for cell in cells} == {"local", "push", "forward", "distributed"}
    assert {cell.servers for cell in cells} == {1, 2, 4}
    assert {cell.per for cell in cells} == {"item", "call"}
    assert {cell.mode for cell in QUICK_CELLS} <= {cell.mode for cell in cells}


def test_the_picture_has_a_mark_for_every_arm_of_every_cell() -> None:
    drawn = ET.fromstring(picture(rows(cell_of({}))))  # noqa: S314 - our own
    marks = list(drawn.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(marks) == 2 * len(STEPS_S)  # in the legend, and in the line
    assert any(each.text == "fxlib: 20.00 ms" for each in drawn.iter("{http://www.w3.org/2000/svg}title"))
    assert any(each.text == BOUND for each in drawn.iter("{http://www.w3.org/2000/svg}title"))


class Late(nn.Module):
    """A lookup whose indices are there early, and whose result is needed late."""

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        first = dense.relu()
        rows = rpc_sync("ps0", ps.lookup, args=("t", indices))
        second = first.exp()
        return torch.cat([second, rows], 1)


def test_the_arm_of_the_paper_issues_as_early_as_data_allows_and_waits_right_before_the_first_use() -> None:
    contract = fxlib.Contract(reads=frozenset({"tables"}))
    graph = fxlib.capture(Late(), contracts={"fxlib.ps:lookup": contract})
    nodes = list(fxlib.optimize(graph, recipe=paper.RECIPE).graph.nodes)
    issue, wait = next(filter(is_issue, nodes)), next(filter(is_wait, nodes))
    assert issue.prev.name == "indices"
    assert wait.next.target is torch.cat


def test_the_arm_of_the_paper_moves_the_note_of_a_gradient_with_its_wait() -> None:
    nodes = list(fxlib.optimize(fxlib.capture(Late()), recipe=paper.RECIPE).graph.nodes)
    wait = next(filter(is_wait, nodes))
    assert [each.name for each in wait.users] == [wait.next.name]
    assert wait.next.next.target is torch.cat


def test_where_the_bound_forbids_the_share_the_distance_to_it_is_told() -> None:
    found = summary(rows(replace(cell_of({"fxlib": 0.052}), bound_s={"bound": 0.05, "pipeline_bound": 0.012})))
    assert figure(found, "fxlib", "distance_to_bound").value == pytest.approx(0.04)
    assert figure(found, "fxlib", "cells_that_the_bound_keeps_below_0.90").value == 1
    assert not [each for each in summary(rows(cell_of({}))) if each.metric == "distance_to_bound"]


def test_the_error_of_a_prediction_is_a_share_of_what_was_measured() -> None:
    found = rows(replace(cell_of({"fxlib": 0.02}), predicted_s={"fxlib": 0.019}))
    assert figure(found, "fxlib", "prediction_error").value == pytest.approx(0.05)
