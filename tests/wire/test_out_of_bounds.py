"""Operators called out of bounds, in processes that see it: a part of what `benchmarks.out_of_bounds` tries."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxlib.wire import memory_safety

ONLY = "aten::nll_loss,torch.nn.functional.nll_loss,aten::index_select,torch.nn.functional.embedding_bag,index_select"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_leaves_its_tensors_is_seen_and_what_may_travel_does_not(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    command = [sys.executable, "-m", "benchmarks.out_of_bounds", "--only", ONLY, "--count", "80", "--trials", str(file)]
    subprocess.run([*command, "--jobs", "1"], check=True, capture_output=True, timeout=200)
    trials = {each["name"]: each for each in map(json.loads, file.read_text().splitlines())}
    assert trials["aten::nll_loss_backward.default"]["deaths"]
    assert not [name for name, each in trials.items() if each["deaths"] and name in memory_safety.safe()]
    assert sum(each["calls"] for each in trials.values()) > 300
