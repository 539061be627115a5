"""An interrupt while gradients are pushed, wherever it comes: servers have taken all of them, or none."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from fxlib.runtime.gradients.pushes import uninterrupted
from fxlib.runtime.push_gradients import drop_gradients, push_gradients
from fxlib.runtime.tracking.flow_control import DEADLINES
from tests.runtime.gradients.pushing import BOTH, backward, log, model, step

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")

ALL = (["a [1.0, 1.0]", "b [2.0, 2.0]"], ["c [3.0, 3.0]"])
NONE: tuple[list[str], list[str]] = ([], [])


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt: in the background of a shell, a process ignores it from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_WHERE = (
    "fxlib/runtime/push_gradients.py",
    "fxlib/runtime/gradients/pushes.py",
    "fxlib/batch/__init__.py",
)
"""Not where locks are taken: a tracer interrupts at the end of a block, before its lock is released; no signal does."""


def interrupted_at(line: int, run: Callable[[], None]) -> bool:
    """Run something that Ctrl-C interrupts at its `line`-th line in the files above; return whether it came so far."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(_WHERE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen >= line


@pytest.mark.slow
def test_wherever_ctrl_c_comes_within_the_push_servers_have_taken_all_or_nothing() -> None:
    module = model(*BOTH)
    found, line, reached = [], 0, True
    while reached:
        line += 1
        backward(module)
        try:
            reached = interrupted_at(line, lambda: push_gradients(module))
        except KeyboardInterrupt:
            assert DEADLINES.in_flight == 0
        found.append((log("ps0"), log("ps1")))
        drop_gradients(module)
    assert found[0] == NONE
    assert found[-1] == ALL
    last_of_none = max(place for place, each in enumerate(found) if each == NONE)
    assert found[: last_of_none + 1] == [NONE] * (last_of_none + 1)
    assert found[last_of_none + 1 :] == [ALL] * (len(found) - last_of_none - 1)
    assert len(found) - last_of_none > 50  # most of the lines are those within


def test_a_step_after_an_interrupted_one_is_pushed_alone() -> None:
    module = model(*BOTH)
    backward(module)
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(1, lambda: push_gradients(module))
    drop_gradients(module)
    step(module)
    assert (log("ps0"), log("ps1")) == ALL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_signal_does_it_does_behind_the_block_and_handlers_are_as_before(number: signal.Signals) -> None:
    came: list[str] = []
    before = signal.signal(number, lambda *_: came.append("signal"))
    try:
        handler = signal.getsignal(number)
        with uninterrupted():
            signal.raise_signal(number)
            came.append("block")
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert came == ["block", "signal"]


def test_an_interrupt_of_a_block_that_raises_is_raised_from_its_error() -> None:
    def interrupted() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    seen: list[Any] = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.default_int_handler]
