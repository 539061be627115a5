"""What a capture puts in place of functions ends with it, whoever keeps the code."""

from __future__ import annotations

import weakref
from types import FunctionType

from fxlib.capture.intercept import Interception


class Replacement:
    """What a function is replaced by, with all that a capture has made."""

    def __call__(self) -> str:
        return "captured"


def test_code_that_a_profiler_keeps_runs_the_original_after_a_capture_and_keeps_nothing_of_it() -> None:
    def function() -> str:
        return "original"

    made: list[weakref.ref[Replacement]] = []

    def replace(_: object) -> Replacement:
        replacement = Replacement()
        made.append(weakref.ref(replacement))
        return replacement

    with Interception() as interception:
        interception.function(function, replace)
        code = function.__code__
        assert function() == "captured"
    assert function() == "original"
    assert FunctionType(code, {})() == "original"
    assert made[0]() is None
