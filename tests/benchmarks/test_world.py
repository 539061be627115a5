"""All arms of `benchmarks.overlap`, against real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.grid.cells import BLOCKING, COMPUTE, FXLIB, HAND, HAND_PIPELINE, PAPER, PIPELINE, Cell, Mode
from benchmarks.grid.measure import Measured

SMALL = Cell(lookups=4, service_ms=0.5, hidden=16)
MODES: tuple[Mode, ...] = ("local", "push", "forward", "distributed")


@pytest.mark.slow
def test_in_every_mode_all_arms_leave_the_same_bits_and_are_timed(tmp_path: Path) -> None:
    asked, found = tmp_path / "cells.json", tmp_path / "found.json"
    cells = [replace(SMALL, mode=mode) for mode in MODES]
    asked.write_text(json.dumps({"rounds": 2, "cells": [asdict(cell) for cell in cells]}))
    command = [sys.executable, "-m", "benchmarks.grid.measure", str(asked), str(found)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr  # it compares losses, weights and servers of all arms, and fails otherwise
    measured = [Measured.from_json(each) for each in json.loads(found.read_text())]
    assert [each.cell for each in measured] == cells
    for each in measured:
        across = set() if each.cell.mode == "distributed" else {PIPELINE, HAND_PIPELINE}  # nothing runs ahead there
        assert each.step_s.keys() == {BLOCKING, PAPER, FXLIB, HAND, COMPUTE} | across
        assert all(len(samples) == 2 and min(samples) > 0 for samples in each.step_s.values())
