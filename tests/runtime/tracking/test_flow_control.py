"""What is in flight as a forward runs: deadlines of calls that share a server, and limits on their number and size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from fxlib.runtime.ops import limit_in_flight
from fxlib.runtime.tracking.flow_control import Deadlines, FlowControl, tensor_bytes
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext


class Future:
    """Complete when it is told so, or when somebody waits for it."""

    def __init__(self, log: list[str], name: str, result: object = None) -> None:
        self.name, self.complete = name, False
        self._log, self._result = log, result

    def done(self) -> bool:
        return self.complete

    def wait(self) -> object:
        if not self.complete:
            self._log.append(f"{self.name} waited for")
        self.complete = True
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def issue(log: list[str], name: str, result: object = None) -> Callable[[], Future]:
    def start() -> Future:
        log.append(name)
        return Future(log, name, result)

    return start


def test_an_issue_waits_until_an_earlier_call_to_its_server_has_landed() -> None:
    log: list[str] = []
    found = FlowControl(2, None)
    for name in ("a", "b", "c"):
        found.start("ps0", "f", (), issue(log, name))
    found.start("ps1", "f", (), issue(log, "elsewhere"))
    assert log == ["a", "b", "a waited for", "c", "elsewhere"]


def test_a_call_that_has_landed_gives_its_credit_back_in_whatever_order() -> None:
    log: list[str] = []
    found = FlowControl(2, None)
    found.start("ps0", "f", (), issue(log, "a"))
    second = found.start("ps0", "f", (), issue(log, "b"))
    second.complete = True
    found.start("ps0", "f", (), issue(log, "c"))
    assert log == ["a", "b", "c"]


def test_bytes_are_those_of_arguments_and_of_the_largest_result_so_far() -> None:
    log: list[str] = []
    found, sent = FlowControl(None, 100), (torch.zeros(10),)
    found.start("ps0", "of a test", sent, issue(log, "a", result=[torch.zeros(20)]))
    found.start("ps0", "of a test", sent, issue(log, "b"))
    assert log == ["a", "b"]
    found.start("ps0", "of a test", sent, issue(log, "c"))  # 40 + 40 + 40: one has to land, which tells of 80 more
    assert log == ["a", "b", "a waited for", "b waited for", "c"]


def test_a_call_larger_than_the_limit_goes_alone() -> None:
    log: list[str] = []
    found = FlowControl(None, 10)
    for name in ("a", "b"):
        found.start("ps0", "large", (torch.zeros(100),), issue(log, name))
    assert log == ["a", "a waited for", "b"]


def test_the_error_of_a_call_that_lands_meanwhile_stays_with_its_own_wait() -> None:
    log: list[str] = []
    found = FlowControl(1, None)
    first = found.start("ps0", "f", (), issue(log, "a", result=ValueError("broken")))
    found.start("ps0", "f", (), issue(log, "b"))
    with pytest.raises(ValueError, match="broken"):
        first.wait()


def test_the_bytes_of_a_nest_are_those_of_its_tensors() -> None:
    assert tensor_bytes(({"a": [torch.zeros(2), "text"]}, 3, torch.zeros(1, dtype=torch.int64))) == 8 + 8


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_by_what_they_hold(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that support of compressed formats is young
        sparse = torch.eye(3).to_sparse(layout=layout)
    assert tensor_bytes([sparse]) == 3 * (4 + 2 * 8)


@contextmanager
def forward() -> Iterator[ForwardContext]:
    outer, forward = THREAD.forward, ForwardContext()
    THREAD.forward = forward
    try:
        yield forward
    finally:
        THREAD.forward = outer


def test_a_forward_sets_its_own_limits() -> None:
    limit_in_flight(1, None)  # outside of a forward there is nothing to limit
    with forward() as one:
        limit_in_flight(1, None)
        assert one.flow_control is not None
    with forward() as other:
        assert other.flow_control is None


def test_a_call_has_the_time_of_those_before_it_until_they_have_landed() -> None:
    deadlines, log = Deadlines(), list[str]()
    first, second = Future(log, "a"), Future(log, "b")
    deadlines.watch("ps0", 5.0, first)
    deadlines.watch("ps0", 3.0, second)
    assert (deadlines.deadline("ps0", 1.0), deadlines.deadline("ps1", 1.0)) == (9.0, 1.0)
    first.complete = True
    assert (deadlines.deadline("ps0", 1.0), deadlines.in_flight) == (4.0, 1)
    deadlines.forget(second)
    assert (deadlines.deadline("ps0", 1.0), deadlines.in_flight) == (1.0, 0)


def test_calls_that_nobody_waits_for_are_in_flight_until_they_have_landed() -> None:
    deadlines = Deadlines()
    futures = [Future([], name) for name in ("a", "b")]
    for future in futures:
        deadlines.watch("ps0", 1.0, future)
    assert deadlines.in_flight == 2
    for future in futures:
        future.complete = True
    assert deadlines.in_flight == 0
