"""Measuring whole steps that somebody else runs, as a trial does."""

import time

import pytest
import torch
from torch.distributed import rpc

import fxlib
from fxlib import ps
from fxlib.analysis.cost.bound import bound, fastest
from fxlib.errors import FxlibError
from fxlib.profiling import measure
from fxlib.runtime.ops.timeline import current_recording
from tests.profiling.clicks import Clicks, batch, digests

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]


def test_pushes_that_a_step_makes_are_measured() -> None:
    module, inputs = fxlib.capture(Clicks()), batch().inputs
    before = digests()

    def step() -> None:
        loss = module(*inputs).sum()
        recording = current_recording()
        assert recording is not None
        with recording.span("backward"):
            loss.backward()
        rpc.rpc_sync("ps1", ps.set_service_time, args=(0.05,))
        fxlib.push_gradients(module)
        rpc.rpc_sync("ps1", ps.set_service_time, args=(0.02,))

    found = measure(module, step, steps=2, warmups=0)
    for call, least_s in zip(found.calls, (0.002, 0.05), strict=True):  # of the push, and not of the lookup
        assert call.push is not None
        assert call.push.service_s.count == 2
        # What issuing and waiting take is told by the call, and taken off.
        assert call.push.service_s.least + call.issue_s + call.wait_s >= least_s
    assert digests() != before


def test_a_step_that_does_not_run_the_module_is_refused() -> None:
    with pytest.raises(FxlibError, match="its own code did not run"):
        measure(fxlib.capture(Clicks()), lambda: None, steps=1)


def test_all_forwards_of_a_step_count(quick_servers: None) -> None:
    module, inputs = fxlib.capture(Clicks()), batch().inputs

    def step() -> None:
        for _ in range(3):
            with torch.enable_grad():
                module(*inputs)

    found = measure(module, step, steps=2, warmups=0)
    assert found.calls[0].service_s.count == 6
    assert (found.loss_s, found.backward_s) == (0.0, 0.0)


def test_a_bound_is_of_the_least_that_any_step_took_where_no_step_runs_without_its_calls(quick_servers: None) -> None:
    module, inputs = fxlib.capture(Clicks()), batch().inputs
    works_s = iter([0.01, 0.05, 0.06])

    def step() -> None:
        module(*inputs)
        recording, until_s = current_recording(), time.thread_time() + next(works_s)
        assert recording is not None
        with recording.span("backward"):
            while time.thread_time() < until_s:
                pass

    found = measure(module, step, steps=3, warmups=0)
    assert found.backward_s >= 0.05
    assert fastest(found).backward_s < 0.6 * found.backward_s
    assert bound(module, found).step_s < bound(module, found, typical=True).step_s - 0.02
