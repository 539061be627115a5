"""The processes of a trial, where Ray has no room for them, or one of them has no memory."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

import fxlib
from fxlib import wire
from fxlib.reasons import Reason
from fxlib_workers.process.exceptions import Raised
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.nodes import Nodes
from fxlib_workers.trial.trainer import EncodedProgram
from tests.workers.cases import Lookups, lookup_workload
from tests.workers.trial_settings import SETTINGS


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_an_infeasible_placement_is_a_reason_and_not_a_hang() -> None:
    settings = replace(SETTINGS, cpus_per_process=100.0, placement_timeout_s=0.5)
    graph = wire.encode(fxlib.capture(Lookups())).graph.SerializeToString()
    program = EncodedProgram(original=graph, workload=b"", blobs={})
    with pytest.raises(TrialError) as caught:
        ClusterRun(Nodes(settings), lookup_workload(), program, lambda: False)
    assert caught.value.reason is Reason.NO_CAPACITY
    assert "100 CPUs" in caught.value.detail


@pytest.mark.parametrize("written", [[False], [True]])
def test_all_trainers_learn_whether_the_model_writes_its_inputs(written: list[bool]) -> None:
    run = ClusterRun.__new__(ClusterRun)
    run.trainers, run._collective = [mock.sentinel.first, mock.sentinel.second], False
    with mock.patch.object(ClusterRun, "ask", return_value=written) as ask:
        run.settle_inputs(1.0)
    assert ask.call_args_list == [
        mock.call([mock.sentinel.first], "writes_inputs", timeout_s=1.0),
        mock.call([mock.sentinel.first, mock.sentinel.second], "note_inputs", written[0], timeout_s=1.0),
    ]


@pytest.mark.parametrize("stranded", [False, True])
@pytest.mark.parametrize("out_of_memory", [False, True])
def test_processes_that_wait_for_one_that_raised_run_no_other_program(stranded: bool, out_of_memory: bool) -> None:
    run = ClusterRun.__new__(ClusterRun)
    run._lifelines = {}
    raised = Raised(text="no", out_of_memory=out_of_memory, stranded=stranded)
    with mock.patch.object(ClusterRun, "_out_of_memory", return_value=None):
        error = run._failure(raised, Reason.TRIAL_DIED)
    assert error.reason is (Reason.OUT_OF_MEMORY if out_of_memory else Reason.TRIAL_DIED)
    assert error.survived is not stranded
