"""That the memory a schedule takes is observed where it is taken, and stays within the limit asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.grid import memory_limit
from benchmarks.report import Row

PROGRAM = """
from benchmarks.grid import memory_limit
if __name__ == "__main__":
    memory_limit.LOOKUPS, memory_limit.ROUNDS = 8, 3
    memory_limit.main()
"""
"""The measurement, of twice as many results as the limit has room for."""


def unseen_mib() -> float:
    """What the kernel's count of resident memory may be off by: each core adds to it in steps of so many pages."""
    cores = os.cpu_count() or 1
    return max(32, 2 * cores) * cores * os.sysconf("SC_PAGE_SIZE") / memory_limit.MIB


@pytest.mark.slow
def test_a_limited_schedule_stays_within_its_limit_and_an_unlimited_one_does_not(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(found)]
    env = os.environ | memory_limit.ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280, env=env)
    assert run.returncode == 0, run.stderr
    rows = [Row(**each) for each in json.loads(found.read_text())]
    observed = {each.case["limit"]: each.value for each in rows if each.metric == "peak_memory"}
    predicted = {each.case["limit"]: each.value for each in rows if each.metric == "predicted_peak_memory"}
    result_mib = memory_limit.RESULT_BYTES / memory_limit.MIB
    assert observed[memory_limit.AS_WRITTEN] < 2 * result_mib + unseen_mib()  # one result at a time
    assert observed[memory_limit.UNLIMITED] > observed[memory_limit.LIMITED]
    assert rows[-1].metric == "peak_memory_of_allowed"
    assert rows[-1].value <= 1.0
    for limit, peak in observed.items():  # whatever else the process takes meanwhile is much less than one result
        assert peak <= predicted[limit] + result_mib / 4 + unseen_mib(), (limit, peak, predicted[limit])
