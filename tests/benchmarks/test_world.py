"""All arms of `benchmarks.overlap`, against real servers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.grid.cells import BLOCKING, COMPUTE, FXLIB, HAND, HAND_PIPELINE, PAPER, PIPELINE, Cell, Mode
from benchmarks.grid.measure import Measured
from tests.shared.forked import Module

SMALL = Cell(lookups=4, service_ms=0.5, hidden=16)
MODES: tuple[Mode, ...] = ("local", "push", "forward", "distributed")

PROGRAM = """
from benchmarks.grid import measure
if __name__ == "__main__":
    measure.BLOCK_S, measure.TRIED_ROUNDS = 0.01, 1
    measure.main()
"""
"""The measurement, in blocks that are as long as a test needs them."""


@pytest.mark.slow
def test_in_every_mode_all_arms_leave_the_same_bits_and_are_timed(tmp_path: Path) -> None:
    asked, found = tmp_path / "cells.json", tmp_path / "found.json"
    cells = [replace(SMALL, mode=mode) for mode in MODES]
    asked.write_text(json.dumps({"rounds": 2, "cells": [asdict(cell) for cell in cells]}))
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    run = Module("program", str(asked), str(found), log=log, folder=tmp_path)
    assert run.wait() == 0, log.read_text()  # it compares losses, weights and servers of all arms, and fails otherwise
    measured = [Measured.from_json(each) for each in json.loads(found.read_text())]
    assert [each.cell for each in measured] == cells
    for each in measured:
        across = set() if each.cell.mode == "distributed" else {PIPELINE, HAND_PIPELINE}  # nothing runs ahead there
        assert each.step_s.keys() == {BLOCKING, PAPER, FXLIB, HAND, COMPUTE} | across
        assert all(len(samples) == 2 and min(samples) > 0 for samples in each.step_s.values())
