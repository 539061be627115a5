"""Gradients travel together where the program pushes them, and servers take them as the program would have it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fxlib import batch
from fxlib.runtime import CapturedModule, record
from fxlib.runtime.ops import send_gradient, track_gradient
from fxlib.runtime.push_gradients import push_gradients
from fxlib.spec.report import Span
from tests.runtime.gradients.pushing import BOTH, ROWS, TWO, backward, log, messages, model, step
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME, read_log
from tests.shared.undisturbed import undisturbed

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")


def test_nothing_leaves_before_the_program_pushes_and_then_one_message_goes_to_each_server() -> None:
    module = model(*BOTH)
    with messages() as before:
        backward(module)
    assert log() == log("ps1") == []
    with messages() as sent:
        push_gradients(module)
    assert before == []
    assert [to for to, _ in sent] == ["ps0", "ps1"]
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"]
    assert log("ps1") == ["c [3.0, 3.0]"]


def test_gradients_for_one_server_travel_in_one_message_in_program_order() -> None:
    with messages() as sent:
        step(model(*TWO))
    assert sent == [("ps0", batch.run_in_order)]
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"]


def test_a_message_of_one_is_a_plain_call() -> None:
    with messages() as sent:
        step(model(("ps1", "take_gradient", "c")))
    assert [function.__name__ for _, function in sent] == ["take_gradient"]


@pytest.mark.slow
def test_gradients_of_different_parts_of_a_servers_state_are_taken_side_by_side() -> None:
    one_after_another = model(*(("ps0", "take_slowly", name) for name in "abcab"))
    side_by_side = model(*(("ps0", "take_parts_slowly", name) for name in "abcab"))

    def took_s(module: CapturedModule) -> float:
        backward(module)
        start = time.perf_counter()
        push_gradients(module)
        return time.perf_counter() - start

    assert took_s(one_after_another) >= 5 * 0.1
    assert log() == [f"{name} [{scale}.0, {scale}.0]" for scale, name in enumerate("abcab", start=1)]
    two_at_once = undisturbed(lambda: took_s(side_by_side), lambda seconds: seconds < 3.5 * 0.1)
    assert 2 * 0.1 <= two_at_once < 3.5 * 0.1  # two after one another, in place of five


def test_servers_work_at_the_same_time() -> None:
    module = model(("ps0", "take_slowly", "a"), ("ps1", "take_slowly", "b"))
    with record() as recording:
        step(module)
    push, *flights = _spans(recording.timeline.spans)
    assert [flight.to for flight in flights] == ["ps0", "ps1"]
    assert all(push.start_s <= flight.start_s < flight.end_s <= push.end_s for flight in flights)
    assert flights[1].start_s < flights[0].end_s


def _spans(spans: tuple[Span, ...]) -> list[Span]:
    return [span for span in spans if span.kind == "push" or "take" in span.name]


def test_gradients_of_one_part_keep_their_order() -> None:
    step(model(("ps0", "take_part", "a"), ("ps0", "take_part", "b"), ("ps0", "take_part", "a")))
    entries = log()
    assert sorted(entries) == ["a [1.0, 1.0]", "a [3.0, 3.0]", "b [2.0, 2.0]"]
    assert entries.index("a [1.0, 1.0]") < entries.index("a [3.0, 3.0]")


def test_a_part_of_one_state_is_no_part_of_more_state() -> None:
    module = model(("ps0", "take_part", "a"), ("ps0", "take_part_of_all", "a"), ("ps0", "take_part", "b"))
    with messages() as sent:
        step(module)
    assert sent == [("ps0", batch.run_in_order)]


def test_functions_that_may_not_be_batched_are_called_one_after_another() -> None:
    with messages() as sent:
        step(model(("ps0", "take_alone", "a"), ("ps0", "take_alone", "b"), ("ps0", "take_alone", "c")))
    assert [function.__name__ for _, function in sent] == ["take_alone"] * 3
    assert [entry[0] for entry in log()] == ["a", "b", "c"]


def test_a_function_that_declares_nothing_comes_after_all_before_it_and_before_all_behind_it() -> None:
    module = model(
        ("ps0", "take_slowly", "a"),
        ("ps1", "take_slowly", "b"),
        ("ps0", "take_unknown", "c"),
        ("ps1", "take_gradient", "d"),
    )
    with record() as recording:
        step(module)
    before, alone, behind = [span for span in recording.timeline.spans if span.kind == "push"]
    assert (before.to, alone.to, behind.to) == ("", "ps0", "")
    assert before.end_s <= alone.start_s < alone.end_s <= behind.start_s
    assert [entry[0] for entry in log()] == ["a", "c"]
    assert [entry[0] for entry in log("ps1")] == ["b", "d"]


def test_results_that_are_only_tracked_keep_the_programs_order() -> None:
    program, leaves = Program("rows"), []
    for index, (server, operator) in enumerate(
        (("ps0", send_gradient), ("ps0", track_gradient), ("ps0", send_gradient), ("ps1", send_gradient))
    ):
        result = program.call(server, "read", "abcd"[index], program.inputs[0])
        call: Any = (server, f"{NAME}:take_gradient", ("abcd"[index], program.inputs[0]), {}, None, index)
        leaves.append(program.local(operator, result, *call))
    step(program.returns(program.local(torch.cat, leaves, 0)))
    assert [entry[0] for entry in log()] == ["a", "b", "c"]


def test_gradients_for_this_very_process_are_taken_in_the_programs_order() -> None:
    program, leaves = Program("rows"), []
    for index, server in enumerate(("ps0", "trainer", "ps0")):
        result = program.call("ps0", "read", "abc"[index], program.inputs[0])
        call: Any = (server, f"{NAME}:take_gradient", ("abc"[index], program.inputs[0]), {}, None, index)
        leaves.append(program.local(send_gradient, result, *call))
    module = program.returns(program.local(torch.cat, leaves, 0))
    read_log()
    with messages() as sent:
        step(module)
    assert [to for to, _ in sent] == ["ps0", "ps0"]
    assert read_log() == ["b [1.0, 1.0]"]


def test_a_result_without_gradient_is_left_out() -> None:
    with messages() as sent:
        step(model(*TWO, weights=(0.0, 1.0)))
    assert len(sent) == 1
    assert log() == ["b [1.0, 1.0]"]


def two_backwards(module: CapturedModule) -> None:
    loss = module(ROWS).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(module: CapturedModule) -> None:
    (module(ROWS) + module(ROWS)).sum().backward()


def forward_before_the_push(module: CapturedModule) -> None:
    backward(module)
    with torch.no_grad():
        module(ROWS)


def gradients_with_a_graph(module: CapturedModule) -> None:
    module(ROWS).square().sum().backward(create_graph=True)


def backward_by_halves(module: CapturedModule) -> None:
    kept = module(ROWS)
    kept[:1].sum().backward(retain_graph=True)
    kept[1:].sum().backward()


OTHER_STEPS = (two_backwards, two_forwards, forward_before_the_push, gradients_with_a_graph, backward_by_halves)


@pytest.mark.parametrize("other", OTHER_STEPS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_whatever_a_step_is_the_push_is_that_of_the_program(other: Any) -> None:
    found = []
    for module in (model(*TWO, operator=track_gradient), model(*TWO)):
        for _ in range(3):
            other(module)
            push_gradients(module)
        found.append(log())
    assert found[0] == found[1]
    assert len(found[0]) >= 3 * 2


def test_what_is_sent_is_the_gradient_that_came_whatever_becomes_of_memory_that_it_shares() -> None:
    def run(operator: Any) -> list[str]:
        program, leaves = Program("rows"), []
        for index, name in enumerate("ab"):
            result = program.call("ps0", "read", name, program.inputs[0])
            call: Any = ("ps0", f"{NAME}:take_gradient", (name, program.inputs[0]), {}, None, index)
            leaves.append(program.local(operator, result, *call))
        module = program.returns(program.local(torch.cat, leaves, 0))
        kept: list[torch.Tensor] = []
        output = module(ROWS)
        output.register_hook(kept.append)
        (output * 2).sum().backward()
        kept[0].zero_()  # the gradients of both results are views of it
        push_gradients(module)
        return log()

    assert run(track_gradient) == run(send_gradient) == ["a [2.0, 2.0]", "b [2.0, 2.0]"]
