"""Many calls in one message, as a server runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from fxlib import batch
from fxlib.spec.workload import Server
from tests.batch import functions
from tests.shared.rpc_world import rpc_world

X = torch.tensor([1.0, 2.0])


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        yield


def ask(*calls: tuple[Any, ...], entry: Any = batch.run) -> list[Any]:
    """Send calls, each a function and its arguments, in one message."""
    return rpc.rpc_sync("ps0", entry, args=([(function, args, {}) for function, *args in calls],))


def log() -> list[str]:
    return rpc.rpc_sync("ps0", functions.take_log)


def raised(call: Any) -> tuple[type[BaseException], str]:
    """The type of what a call raises, and its message, with the traceback of the server.

    Torch adds where its own thread of this process stood then, which depends on timing.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the result
        call()
    return caught.type, str(caught.value).partition("\n\nAt:\n")[0]


def test_results_come_in_the_order_of_the_calls() -> None:
    outcomes = ask((functions.slow, 0.05), (functions.double, X), (functions.slow, 0.01))
    assert [outcomes[0], outcomes[2]] == [0.05, 0.01]
    assert torch.equal(batch.result(outcomes[1]), X * 2)


def test_calls_run_side_by_side() -> None:
    assert sorted(ask(*[(functions.meet,)] * 3)) == [0, 1, 2]


@pytest.mark.slow
def test_a_call_that_is_known_to_be_brief_is_not_held_up_by_a_slow_one_before_it() -> None:
    for _ in range(3):
        ask(*[(functions.double, X)] * 4)
    log()
    ask((functions.slow, 0.3), (functions.double, X), (functions.double, X), (functions.double, X))
    assert log().count("double [1.0, 2.0]") == 3


def test_more_calls_than_threads_all_run() -> None:
    assert ask(*[(functions.slow, 0.001 * place) for place in range(50)]) == [0.001 * place for place in range(50)]


@pytest.mark.parametrize("kind", ["key", "type", "particular", "uncommon", "runtime"])
def test_an_error_is_that_of_the_single_call(kind: str) -> None:
    outcomes = ask((functions.double, X), (functions.refuse, kind), (functions.double, X))
    assert [batch.failed(each) for each in outcomes] == [False, True, False]
    alone = raised(lambda: rpc.rpc_sync("ps0", functions.refuse, args=(kind,)))
    assert raised(lambda: batch.result(outcomes[1])) == alone


def test_what_would_end_the_servers_thread_is_raised_at_once() -> None:
    alone = raised(lambda: rpc.rpc_sync("ps0", functions.leave, args=(0.0,)))
    together = raised(lambda: ask((functions.leave, 0.05), (functions.leave, 0.05), (functions.slow, 0.05)))
    assert together[0] is alone[0]
    assert alone[1].startswith("SystemExit: 3")
    assert together[1].startswith("SystemExit: 3")


@pytest.mark.parametrize("entry", [batch.run, batch.run_in_order])
def test_a_call_does_not_see_what_another_writes_to_their_common_argument(entry: Any) -> None:
    x, entries = torch.tensor([1.0, 2.0]), {"key": 1}
    written = ask((functions.raised_by, x), (functions.raised_by, x), (functions.raised_by, x[:1]), entry=entry)
    assert [batch.result(each).tolist() for each in written] == [[2.0, 3.0], [2.0, 3.0], [2.0]]
    assert ask((functions.take_out, entries), (functions.take_out, entries), entry=entry) == [1, 1]


def test_results_share_no_memory() -> None:
    one, other, overlapping = ask((functions.row, 0), (functions.row, 0), (functions.row, 1))
    one.zero_()
    assert [other.tolist(), overlapping.tolist()] == [[0.0, 1.0], [1.0, 2.0]]


def test_in_order_they_stop_at_the_first_failure() -> None:
    log()
    calls = [(functions.write, "a"), (functions.write, "broken"), (functions.write, "b")]
    outcomes = ask(*calls, entry=batch.run_in_order)
    assert [batch.failed(each) for each in outcomes] == [False, True]
    assert log() == ["a"]


def test_in_order_a_result_does_not_show_what_later_calls_write_to_it() -> None:
    first, second = ask((functions.add_to_total, X), (functions.add_to_total, X), entry=batch.run_in_order)
    assert torch.equal(second - first, X)
    entries = ask((functions.append, 1), (functions.append, 2), entry=batch.run_in_order)
    assert [len(each) for each in entries] == [1, 2]


def test_in_order_a_result_lies_in_memory_as_it_would_alone() -> None:
    repeated, last = ask((functions.same, X[:1].expand(4)), (functions.same, X), entry=batch.run_in_order)
    assert repeated.stride() == (0,)
    assert torch.equal(repeated, X[:1].expand(4))
    assert torch.equal(last, X)


def test_in_order_nothing_runs_after_a_result_that_cannot_be_sent() -> None:
    log()
    outcomes = ask((functions.write, "a"), (functions.unsendable,), (functions.write, "b"), entry=batch.run_in_order)
    assert raised(lambda: batch.result(outcomes[1]))[0] is RuntimeError
    assert log() == ["a"]


def test_in_order_a_last_result_that_cannot_be_sent_is_its_own_failure_alone() -> None:
    outcomes = ask((functions.double, X), (functions.unsendable,), entry=batch.run_in_order)
    assert torch.equal(batch.result(outcomes[0]), X * 2)
    assert raised(lambda: batch.result(outcomes[1]))[0] is RuntimeError


def test_in_order_nothing_runs_after_a_call_that_took_longer_than_its_caller_waits() -> None:
    log()
    calls: list[batch.Call] = [(functions.slow, (0.05,), {}), (functions.write, ("b",), {})]
    outcomes = rpc.rpc_sync("ps0", batch.run_in_order, args=(calls, 0.01))
    assert len(outcomes) == 1
    kind, text = raised(lambda: batch.result(outcomes[0]))
    assert kind is RuntimeError
    assert text.startswith(batch.TIMED_OUT)
    assert log() == ["slow 0.05"]


def test_a_declared_batched_form_serves_all_at_once() -> None:
    log()
    calls: list[batch.Call] = [(functions.double, (X,), {"plus": 1.0}), (functions.double, (X,), {})]
    outcomes = rpc.rpc_sync("ps0", batch.run_batched, args=(functions.double_many, calls))
    assert [each.tolist() for each in outcomes] == [[3.0, 5.0], [2.0, 4.0]]
    assert log() == ["double_many of 2"]


@pytest.mark.parametrize("form", [functions.too_few, functions.fail])
def test_where_the_batched_form_fails_the_calls_run_singly(form: Any) -> None:
    calls: list[batch.Call] = [(functions.double, (X,), {}), (functions.fail, ("this one",), {})]
    outcomes = rpc.rpc_sync("ps0", batch.run_batched, args=(form, calls))
    assert outcomes[0].tolist() == [2.0, 4.0]
    assert "this one" in raised(lambda: batch.result(outcomes[1]))[1]


@pytest.mark.parametrize("entry", [batch.run, batch.run_in_order])
def test_one_call_of_a_batch_is_the_first(entry: Any) -> None:
    assert sorted(ask(*[(functions.first,)] * 5, entry=entry)) == [False, False, False, False, True]
    assert rpc.rpc_sync("ps0", functions.first)


@pytest.mark.parametrize("entry", [batch.run, batch.run_in_order])
def test_one_call_of_a_message_is_the_first_though_it_holds_batches(entry: Any) -> None:
    inner: list[batch.Call] = [
        (batch.run_in_order, ([(functions.first, (), {})] * 3,), {}),
        (batch.run, ([(functions.first, (), {})] * 2,), {}),
    ]
    found = [batch.result(each) for each in rpc.rpc_sync("ps0", entry, args=(inner,))]
    assert sorted(map(batch.result, [*found[0], *found[1]])) == [False] * 4 + [True]
    assert rpc.rpc_sync("ps0", functions.first)


def test_gradients_of_distributed_autograd_flow_through_a_batch() -> None:
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    with dist_autograd.context() as context:
        one, other = ask((functions.attached, x), (functions.attached, x * 2))
        dist_autograd.backward(context, [(one + 3 * other).sum()])
        local = dist_autograd.get_gradients(context)[x]
        remote = rpc.rpc_sync("ps0", functions.weight_gradient, args=(context,))
    y = torch.tensor([0.3, 0.7], requires_grad=True)
    weight = functions.WEIGHT.detach().clone().requires_grad_()
    (y.sin() * weight + 3 * (y * 2).sin() * weight).sum().backward()
    assert y.grad is not None
    assert weight.grad is not None
    assert torch.allclose(local, y.grad)
    assert torch.allclose(remote, weight.grad)


@pytest.mark.parametrize("before_s", [0.0, 0.02])
def test_in_a_context_of_distributed_autograd_calls_that_wait_run_in_one_thread(before_s: float) -> None:
    for _ in range(5):
        before = ask(*[(functions.thread_after, before_s)] * 3)
    assert not before_s or len({thread for thread, _ in before}) > 1
    assert all(beside for _, beside in before)
    with dist_autograd.context():
        found = ask(*[(functions.thread_after, 0.02)] * 3)
    assert len({thread for thread, _ in found}) == 1
    assert not any(beside for _, beside in found)


def attached_to_one_argument(x: torch.Tensor) -> list[tuple[Any, ...]]:
    return [(functions.attached, x), (functions.attached, x), (functions.attached, x * 2)]


def the_weight_itself(_: torch.Tensor) -> list[tuple[Any, ...]]:
    return [(functions.weight,), (functions.weight,)]


def singly(calls: list[tuple[Any, ...]]) -> list[Any]:
    return [rpc.rpc_sync("ps0", function, args=tuple(args)) for function, *args in calls]


def by_the_batched_form(calls: list[tuple[Any, ...]]) -> list[Any]:
    form = functions.attached_many if calls[0][0] is functions.attached else functions.weight_many
    return rpc.rpc_sync("ps0", batch.run_batched, args=(form, [(function, args, {}) for function, *args in calls]))


def ask_at_once(calls: list[tuple[Any, ...]]) -> list[Any]:
    return ask(*calls)


def ask_in_order(calls: list[tuple[Any, ...]]) -> list[Any]:
    return ask(*calls, entry=batch.run_in_order)


@pytest.mark.parametrize("calls", [attached_to_one_argument, the_weight_itself])
@pytest.mark.parametrize("sent", [ask_at_once, ask_in_order, by_the_batched_form])
def test_what_calls_share_takes_the_gradients_of_all_of_them(calls: Any, sent: Any) -> None:
    found: list[list[torch.Tensor]] = []
    for ways in (singly, sent):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        with dist_autograd.context() as context:
            results = [factor * each for factor, each in enumerate(ways(calls(x)), start=1)]
            dist_autograd.backward(context, [torch.stack(results).sum()])
            gradients = [rpc.rpc_sync("ps0", functions.weight_gradient, args=(context,))]
            found.append(gradients + list(dist_autograd.get_gradients(context).values()))
    assert len(found[0]) == len(found[1])
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))
