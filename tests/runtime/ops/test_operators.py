"""The operators do what the user's own idioms do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from fxlib.errors import ContractError
from fxlib.runtime.ops import (
    create,
    fetch,
    issue_batch,
    issue_call,
    issue_fetch,
    remote_call,
    start_call,
    track_gradient,
    wait,
    wait_item,
)
from fxlib.runtime.ops.batches import IN_ORDER
from fxlib.runtime.tracking.flow_control import DEADLINES
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext
from tests.runtime import remote_functions
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers")
X = torch.arange(4.0)


def both(to: object, function: Any, *args: object, timeout: float | None = None, **kwargs: object) -> list[Any]:
    """Results, or errors as (type, text), of the blocking and the issued form."""
    results: list[Any] = []
    for form in (remote_call, lambda *call: wait(issue_call(*call))):
        try:
            results.append(form(to, function, args, kwargs, timeout))
        except Exception as error:  # noqa: BLE001 - compared by the caller
            results.append((type(error), str(error).split("Traceback")[0]))
    return results


@pytest.mark.parametrize("to", ["ps0", 1, "info"])
def test_blocking_and_issued_calls_return_what_rpc_sync_returns(to: object) -> None:
    to = rpc.get_worker_info("ps0") if to == "info" else to
    expected = rpc.rpc_sync(to, remote_functions.add, args=(X, 2), kwargs={"scale": 3.0})
    for result in both(to, f"{NAME}:add", X, 2, scale=3.0):
        assert torch.equal(result, expected)


def test_torch_functions_are_called_by_name() -> None:
    for result in both("ps0", "torch:add", X, X):
        assert torch.equal(result, X + X)


def test_methods_behind_an_rref_are_called_by_name() -> None:
    rref = create("ps1", f"{NAME}:Adder", (2.0,), {}, None)
    expected = rref.rpc_sync().add(X[:2], scale=2.0)
    for result in both(rref, ".add", X[:2], scale=2.0):
        assert torch.equal(result, expected)
    assert torch.equal(create(rref, ".add", (X[:2],), {"scale": 2.0}, None).to_here(), expected)


@pytest.mark.parametrize("case", ["remote error", "unknown worker", "unknown function", "method error", "no method"])
def test_an_issued_call_raises_at_its_wait_what_the_blocking_call_raises(case: str) -> None:
    rref = create("ps1", f"{NAME}:Adder", (2.0,), {}, None)
    call = {
        "remote error": ("ps0", f"{NAME}:fail", "broken"),
        "unknown worker": ("nobody", f"{NAME}:add", X),
        "unknown function": ("ps0", f"{NAME}:nothing"),
        "method error": (rref, ".fail"),
        "no method": (rref, ".nothing"),
    }[case]
    blocking, issued = both(*call)
    assert isinstance(blocking, tuple)
    assert blocking == issued


def test_issuing_never_raises_outside_of_a_forward_either() -> None:
    future = issue_call("nobody", f"{NAME}:add", (X,), {}, None)
    with pytest.raises(RuntimeError, match="nobody"):
        wait(future)


def test_what_the_program_issues_itself_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        start_call("nobody", f"{NAME}:add", (X,), {}, None)
    with pytest.raises(ContractError, match="remote_functions:nothing"):
        start_call("ps0", f"{NAME}:nothing", (), {}, None)
    assert torch.equal(
        wait(start_call("ps0", f"{NAME}:add", (X,), {}, None)), remote_call("ps0", f"{NAME}:add", (X,), {}, None)
    )


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(ContractError, match="remote_functions:nothing"):
        remote_call("ps0", f"{NAME}:nothing", (), {}, None)


def test_fetching_an_rref_early_gives_what_to_here_gives() -> None:
    rref = rpc.remote("ps0", remote_functions.held, args=(X,))
    future = issue_fetch(rref, None)
    assert not future.done()
    remote_call("ps0", f"{NAME}:release", (), {}, None)
    assert torch.equal(wait(future), X)
    assert torch.equal(fetch(rref, None), X)
    remote_call("ps0", f"{NAME}:read_log", (), {}, None)


def test_fetching_an_own_rref_hands_over_the_object_itself() -> None:
    rref = rpc.RRef(X)
    assert wait(issue_fetch(rref, None)) is rref.to_here()


def test_fetching_raises_the_error_of_the_creation() -> None:
    rref = rpc.remote("ps0", remote_functions.fail, args=("not made",))
    with pytest.raises(ValueError, match="not made"):
        wait(issue_fetch(rref, None))


def test_in_a_forward_it_is_the_very_error_that_to_here_raises() -> None:
    """An owner that is asked for its local value wraps the error once more."""
    rref = rpc.remote("ps0", remote_functions.fail, args=("not made",))
    THREAD.forward = forward = ForwardContext()
    try:
        with pytest.raises(ValueError, match="not made") as found:
            wait(issue_fetch(rref, None))
    finally:
        THREAD.forward = None
    with pytest.raises(ValueError, match="not made") as expected:
        rref.to_here()
    assert str(found.value).count("On WorkerInfo") == str(expected.value).count("On WorkerInfo") == 1
    assert found.value.__context__ is None
    assert not forward.fetched


@pytest.mark.slow
def test_a_blocking_call_keeps_its_own_timeout() -> None:
    for result in both("ps0", f"{NAME}:slow", X, 2.0, timeout=0.2):
        assert result[0] is RuntimeError
        assert "timeout" in result[1]


def issued_and_found_answered(*call: Any) -> Any:
    future = issue_call(*call)
    with suppress(RuntimeError):
        future.wait()
    assert DEADLINES.deadline("ps0", 5.0) == 5.0
    return wait(future)


def in_order(to: str, function: str, args: Any, kwargs: Any, timeout: float) -> Any:
    return wait_item(issue_batch(to, ((function, args, kwargs),) * 2, timeout, IN_ORDER), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [remote_call, lambda *call: wait(issue_call(*call)), issued_and_found_answered, in_order]
)
def test_a_timeout_tells_the_calls_own_limit_though_calls_ahead_of_it_gave_it_more(form: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError) as alone:
        rpc.rpc_sync("ps0", remote_functions.slow, args=(X, 1.5), timeout=0.29)
    ahead = issue_call("ps0", f"{NAME}:slow", (X, 1.5), {}, 0.2)
    with pytest.raises(RuntimeError) as caught:
        form("ps0", f"{NAME}:slow", (X, 1.5), {}, 0.29)
    assert str(caught.value) == str(alone.value)
    with pytest.raises(RuntimeError, match="200 ms"):
        wait(ahead)


@pytest.mark.slow
def test_calls_issued_together_have_the_time_that_they_would_have_had_one_by_one() -> None:
    # 40 calls of 0.8 s on 16 threads: the last ends after 2.4 s, above the 2 s that each is given.
    futures = [issue_call("ps0", f"{NAME}:slow", (i, 0.8), {}, 2.0) for i in range(40)]
    assert [wait(future) for future in futures] == list(range(40))


def test_deadlines_forget_calls_that_have_landed() -> None:
    wait(issue_call("ps0", f"{NAME}:add", (X,), {}, 5.0))
    for _ in range(6000):
        if DEADLINES.deadline("ps0", 5.0) == 5.0:
            break
        time.sleep(0.01)
    assert DEADLINES.deadline("ps0", 5.0) == 5.0


def test_a_call_behind_one_without_limit_has_no_limit() -> None:
    future = issue_call("ps0", f"{NAME}:held", (), {}, 0)
    assert DEADLINES.deadline("ps0", 5.0) == 0.0
    assert DEADLINES.deadline("ps1", 5.0) == 5.0
    remote_call("ps0", f"{NAME}:release", (), {}, None)
    wait(future)
    remote_call("ps0", f"{NAME}:read_log", (), {}, None)


def test_issuing_on_an_rref_of_unknown_type_keeps_the_gradients_of_its_server() -> None:
    rref = rpc.remote("ps0", remote_functions.Adder, args=(2.0,))
    with dist_autograd.context() as context:
        result = wait(issue_call(rref, ".add", (X[:2],), {"scale": 3.0}, None))
        dist_autograd.backward(context, [result.sum()])
        assert torch.equal(rref.rpc_sync().gradient(context), torch.full((2,), 3.0))


def test_tracking_leaves_alone_what_takes_no_gradient() -> None:
    call: Any = ("ps0", f"{NAME}:take_gradient", (), {}, None, 0)
    integers, attached = torch.arange(3), X.clone().requires_grad_() * 2
    assert track_gradient(integers, *call) is integers
    assert track_gradient(attached, *call) is attached
    with torch.no_grad():
        assert track_gradient(X, *call) is X
    assert track_gradient((integers, [attached]), *call) == (integers, [attached])
    with pytest.raises(ContractError, match="only a tensor"):
        track_gradient((1, "no tensor"), *call)
