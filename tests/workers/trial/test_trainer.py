"""A trainer tells of a thread that waits for a core, and how far a candidate's values are from the original's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fxlib_workers.trial.digests import digest
from fxlib_workers.trial.trainer import ToleranceCheck, run_delay_s
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


def kept(*steps: dict[str, object]) -> ToleranceCheck:
    made = ToleranceCheck()
    for step, values in enumerate(steps):
        made.keep(step, values, {name: digest(value) for name, value in values.items()})
    return made


def test_the_worst_step_counts() -> None:
    near = kept({"output": torch.tensor([1.0])}, {"output": torch.tensor([2.0])})
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    near.compare("candidate", 1, {"output": torch.tensor([2.5])})
    assert near.errors("candidate") == {"output": pytest.approx(0.25)}


def test_each_candidate_has_errors_of_its_own() -> None:
    near = kept({"output": torch.tensor([1.0])})
    near.compare("far", 0, {"output": torch.tensor([2.0])})
    near.compare("near", 0, {"output": torch.tensor([1.0])})
    assert (near.errors("far"), near.errors("near")) == ({"output": 1.0}, {"output": 0.0})


def test_what_only_one_of_them_leaves_behind_is_infinitely_far() -> None:
    near = kept({"output": 1, "gradient of weight": torch.ones(2)})
    near.compare("candidate", 0, {"output": 1, "loss": torch.ones(1)})
    assert near.errors("candidate") == {"output": 0.0, "gradient of weight": math.inf, "loss": math.inf}


def test_what_is_written_to_later_is_compared_as_it_was() -> None:
    value = torch.tensor([1.0])
    near = kept({"output": value})
    value.fill_(5.0)
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    assert near.errors("candidate") == {"output": 0.0}


def test_the_first_run_of_the_original_is_the_measure() -> None:
    near = kept({"output": torch.tensor([1.0])})
    later: dict[str, object] = {"output": torch.tensor([3.0])}
    near.keep(0, later, {name: digest(value) for name, value in later.items()})
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    assert near.errors("candidate") == {"output": 0.0}
