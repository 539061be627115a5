"""A thread that waits for a core says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxlib_workers.trial.trainer import run_delay_s
from tests.shared.forked import printed

BESIDE_ANOTHER = """
import os, time
from fxlib_workers.trial.trainer import run_delay_s

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
is_other = os.fork() == 0
before, end = run_delay_s(), time.monotonic() + 0.5
while time.monotonic() < end:
    pass
if not is_other:
    print(run_delay_s() - before)
"""


@pytest.mark.slow
def test_two_threads_on_one_core_wait_for_each_other(tmp_path: Path) -> None:
    assert 0.1 < float(printed(BESIDE_ANOTHER, tmp_path)) < 0.6


def test_a_kernel_that_does_not_tell_is_taken_to_have_cores_for_all(tmp_path: Path) -> None:
    assert run_delay_s(tmp_path / "schedstat") == 0.0
