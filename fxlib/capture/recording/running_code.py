"""Note which code runs in this thread, by a hook in C, at little cost and beside other profilers."""

from __future__ import annotations

import contextlib
import cProfile
import sys
import threading
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

from fxlib.errors import CaptureError

Stop = Callable[[], Collection[CodeType]]
"""Ends the noting, and returns the code that has run."""


def noted() -> Stop:
    """Note all code that runs in this thread from now on, until what is returned is called."""
    return _monitored() if hasattr(sys, "monitoring") else _profiled()


def _profiled() -> Stop:
    """Use the one profiler that Python 3.11 has room for; another one goes on afterwards."""
    outer: Any = sys.getprofile()
    profiler = cProfile.Profile(subcalls=False, builtins=False)

    def stop() -> Collection[CodeType]:
        profiler.disable()
        if hasattr(outer, "enable"):
            outer.enable()
        elif outer is not None:
            sys.setprofile(outer)
        return [each.code for each in profiler.getstats() if isinstance(each.code, CodeType)]

    profiler.enable()
    return stop


def _monitored() -> Stop:
    """Be one of the tools for which Python has had room since 3.12."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool, thread, ran = _free_tool(monitoring), threading.get_ident(), dict[int, CodeType]()

    def note(code: CodeType, *_: object) -> Any:
        if threading.get_ident() != thread:
            return None
        ran[id(code)] = code
        return monitoring.DISABLE  # for this place in the code: once is enough

    events = monitoring.events.PY_START, monitoring.events.PY_RESUME
    for each in events:
        monitoring.register_callback(tool, each, note)

    def stop() -> Collection[CodeType]:
        monitoring.set_events(tool, 0)
        for each in events:
            monitoring.register_callback(tool, each, None)
        monitoring.free_tool_id(tool)
        return list(ran.values())

    monitoring.restart_events()  # what an earlier capture has seen
    monitoring.set_events(tool, sum(events))
    return stop


def _free_tool(monitoring: Any) -> int:
    for tool in (4, 3, monitoring.PROFILER_ID, monitoring.OPTIMIZER_ID, monitoring.COVERAGE_ID, monitoring.DEBUGGER_ID):
        with contextlib.suppress(ValueError):  # somebody else's
            monitoring.use_tool_id(tool, "fxlib.capture")
            return int(tool)
    raise CaptureError(
        "six tools monitor this Python (sys.monitoring), and there is no room for a capture to see what runs",
        hint="Capture before they begin.",
    )
