"""Files of a run come back as they were written, and of whatever else lies there a sentence comes."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fxlib.spec.report import Estimate
from fxlib.zoo import Row, Runs
from fxlib.zoo.runs import Run, RunError
from fxlib.zoo.source_files import Dependencies

ROW = Row(
    name="a",
    state="done",
    gain=Estimate(value=0.1, low=0.0, high=0.2),
    qps_original=3.5,
    dependencies=Dependencies(files={"/a": (1, 2)}, environment="x"),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Runs(tmp_path).begin("zoo.toml", ["a"])


def test_a_row_is_read_as_it_was_written(run: Run) -> None:
    run.write(ROW)
    assert run.row("a") == ROW


@pytest.mark.parametrize(
    "change",
    [
        {"state": "over"},
        {"capture_s": {"x": 1}},
        {"attempt": True},
        {"unknown": 1},
        {"gain": [1, 2, 3]},
        {"gain": {"value": "a", "low": 0, "high": 0}},
        {"gain": {"value": math.nan, "low": 0, "high": 0}},
        {"qps_original": 10**400},
        {"dependencies": []},
        {"dependencies": {"files": [], "environment": "x", "complete": True}},
        {"dependencies": {"files": {"/a": [1e999, 1]}, "environment": "x", "complete": True}},
    ],
)
def test_a_row_of_another_form_is_a_sentence(run: Run, change: dict[str, Any]) -> None:
    path = run.folder / "rows" / f"{run.slug('a')}.json"
    path.write_text(json.dumps({"form": 1, **asdict(ROW), **change}))
    with pytest.raises(RunError, match="it is no row of a run"):
        run.row("a")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"form": 1}', '{"form": 1, "entries": [3], "manifest": "z"}'])
def test_what_a_run_says_of_itself_in_another_form_is_a_sentence(run: Run, text: str) -> None:
    (run.folder / "run.json").write_text(text)
    with pytest.raises(RunError, match="it is no file of a run"):
        run.rows()
