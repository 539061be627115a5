"""Gradients leave from inside backward, as the program would have pushed them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import rpc

from fxlib import batch
from fxlib.gradients import push_gradients
from fxlib.result import Span
from fxlib.runtime import CapturedModule, record, send_gradient, track_gradient
from fxlib.runtime.convoy import Convoy
from fxlib.runtime.pushes import Parcel
from tests.runtime.early import BOTH, ROWS, TWO, backward, log, messages, model, step, trained
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME, read_log, release
from tests.undisturbed import undisturbed

pytestmark = pytest.mark.usefixtures("servers", "nothing_under_way")


def test_the_first_step_is_pushed_as_written_and_those_after_it_from_inside_backward() -> None:
    module = model(*BOTH)
    with messages() as first:
        backward(module)
    push_gradients(module)
    with messages() as second:
        backward(module)
    push_gradients(module)
    assert first == []
    assert sorted(to for to, _ in second) == ["ps0", "ps1"]
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"] * 2
    assert log("ps1") == ["c [3.0, 3.0]"] * 2


def test_gradients_for_one_server_travel_in_one_message_in_program_order() -> None:
    module = trained(*TWO)
    with messages() as sent:
        step(module)
    assert sent == [("ps0", batch.run_in_order)]
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"]


def test_an_answer_on_which_nothing_else_depends_is_taken_by_the_program_that_waits_for_it() -> None:
    module, takers = trained(*TWO), list[int]()
    landed = Convoy._landed

    def noting(convoy: Convoy, parcel: Parcel) -> None:
        takers.append(threading.get_ident())
        landed(convoy, parcel)

    with mock.patch.object(Convoy, "_landed", noting):
        step(module)
    assert takers == [threading.get_ident()]


def test_a_group_of_one_is_a_plain_call() -> None:
    module = trained(("ps1", "take_gradient", "c"))
    with messages() as sent:
        step(module)
    assert [function.__name__ for _, function in sent] == ["take_gradient"]


def test_gradients_of_different_parts_of_a_servers_state_are_taken_side_by_side() -> None:
    one_after_another = trained(*(("ps0", "take_slowly", name) for name in "abcab"))
    side_by_side = trained(*(("ps0", "take_parts_slowly", name) for name in "abcab"))

    def took_s(module: CapturedModule) -> float:
        with record() as recording:
            backward(module)
            push_gradients(module)
        flight = _flights(recording.timeline.spans)[0]
        return flight.end_s - flight.start_s

    assert took_s(one_after_another) >= 5 * 0.1
    assert log() == [f"{name} [{scale}.0, {scale}.0]" for scale, name in enumerate("abcab", start=1)]
    two_at_once = undisturbed(lambda: took_s(side_by_side), lambda seconds: seconds < 3.5 * 0.1)
    assert 2 * 0.1 <= two_at_once < 3.5 * 0.1  # two after one another, in place of five


def test_gradients_of_one_part_keep_their_order_and_end_with_their_first_failure() -> None:
    module = trained(("ps0", "take_part", "a"), ("ps0", "take_part", "b"), ("ps0", "take_part", "a"))
    step(module)
    assert sorted(log()) == ["a [1.0, 1.0]", "a [3.0, 3.0]", "b [2.0, 2.0]"]
    module = model(("ps0", "take_part", "refused"), ("ps0", "take_part", "b"), ("ps0", "take_part", "refused"))
    for _ in range(2):
        backward(module)
        with pytest.raises(ValueError, match="refused at 1"):
            push_gradients(module)
    assert log() == ["b [2.0, 2.0]"]


def test_a_part_of_one_state_is_no_part_of_more_state() -> None:
    module = trained(("ps0", "take_part", "a"), ("ps0", "take_part_of_all", "a"), ("ps0", "take_part", "b"))
    with messages() as sent:
        step(module)
    assert sent == [("ps0", batch.run_in_order)]


def test_functions_that_may_not_be_batched_are_called_one_after_another() -> None:
    module = trained(("ps0", "take_alone", "a"), ("ps0", "take_alone", "b"), ("ps0", "take_alone", "c"))
    with messages() as sent:
        step(module)
    assert [function.__name__ for _, function in sent] == ["take_alone"] * 3
    assert [entry[0] for entry in log()] == ["a", "b", "c"]


def test_functions_that_declare_nothing_keep_the_programs_order_across_servers() -> None:
    module = trained(("ps0", "take_unknown", "a"), ("ps1", "take_unknown", "b"), ("ps0", "take_unknown", "c"))
    with messages() as sent:
        step(module)
    assert [to for to, _ in sent] == ["ps0", "ps1", "ps0"]


def test_pushes_are_in_flight_while_backward_and_the_optimizer_run() -> None:
    module = model(("ps0", "take_when_released", "a"), ("ps1", "take_when_released", "b"))
    _release()
    step(module)
    with record() as recording:
        loss = module(ROWS).sum()
        with recording.span("backward"):
            loss.backward()
        with recording.span("optimizer"):
            torch.zeros(1).add_(1)
        _release()
        push_gradients(module)
    spans = {kind: [span for span in recording.timeline.spans if span.kind == kind] for kind in ("push", "optimizer")}
    flights = _flights(recording.timeline.spans)
    assert [span.to for span in flights] == ["ps0", "ps1"] or [span.to for span in flights] == ["ps1", "ps0"]
    assert all(flight.start_s < spans["optimizer"][0].start_s < flight.end_s for flight in flights)
    assert flights[1].start_s < flights[0].end_s
    assert [span.to for span in spans["push"]] == ["ps0", "ps1"]


def _release() -> None:
    for server in ("ps0", "ps1"):
        rpc.rpc_async(server, release)


def _flights(spans: tuple[Span, ...]) -> list[Span]:
    return [span for span in spans if span.kind == "in_flight" and "take" in span.name]


def test_a_result_without_gradient_is_left_out_and_holds_nobody_up() -> None:
    module = trained(*TWO, weights=(0.0, 1.0))
    with messages() as sent:
        backward(module)
    push_gradients(module)
    assert len(sent) == 1
    assert log() == ["b [1.0, 1.0]"]


def test_what_is_sent_is_the_gradient_that_came_whatever_becomes_of_memory_that_it_shares() -> None:
    def run(operator: Any) -> list[str]:
        program, leaves = Program("rows"), []
        for index, name in enumerate("ab"):
            result = program.call("ps0", "read", name, program.inputs[0])
            call: Any = ("ps0", f"{NAME}:take_slowly", (name, program.inputs[0]), {}, None, index)
            leaves.append(program.local(operator, result, *call))
        module = program.returns(program.local(torch.cat, leaves, 0))
        for _ in range(2):
            kept: list[torch.Tensor] = []
            output = module(ROWS)
            output.register_hook(kept.append)
            (output * 2).sum().backward()
            kept[0].zero_()  # the gradients of both results are views of it
            push_gradients(module)
        return log()

    assert run(track_gradient) == run(send_gradient) == ["a [2.0, 2.0]", "b [2.0, 2.0]"] * 2


def test_results_that_are_only_tracked_hold_back_those_of_their_server() -> None:
    program, leaves = Program("rows"), []
    for index, (server, operator) in enumerate(
        (("ps0", track_gradient), ("ps0", send_gradient), ("ps1", send_gradient))
    ):
        result = program.call(server, "read", "abc"[index], program.inputs[0])
        call: Any = (server, f"{NAME}:take_gradient", ("abc"[index], program.inputs[0]), {}, None, index)
        leaves.append(program.local(operator, result, *call))
    module = program.returns(program.local(torch.cat, leaves, 0))
    step(module)
    with messages() as sent:
        backward(module)
    push_gradients(module)
    assert [to for to, _ in sent] == ["ps1"]
    assert [entry[0] for entry in log()] == ["a", "b"] * 2


def test_gradients_for_this_very_process_wait_for_the_push() -> None:
    program = Program("rows")
    result = program.call("ps0", "read", "a", program.inputs[0])
    call: Any = ("trainer", f"{NAME}:take_gradient", ("a", program.inputs[0]), {}, None, 0)
    module = program.returns(program.local(send_gradient, result, *call))
    step(module)
    read_log()
    backward(module)
    assert read_log() == []
    push_gradients(module)
    assert read_log() == ["a [1.0, 1.0]"]


def test_nothing_of_a_step_is_kept_after_its_push() -> None:
    module = trained(*TWO)
    output = module(ROWS)
    forward = weakref.ref(module._fxlib.tape._forwards[-1])
    fan = module._fxlib.tape._forwards[-1].pushes[0].call.arrival.fan
    output.sum().backward()
    push_gradients(module)
    del output
    for _ in range(1000):  # the RPC layer lets go of an answered call in its own time
        gc.collect()
        if fan() is None:
            break
        time.sleep(0.005)
    assert forward() is None
    assert fan() is None
