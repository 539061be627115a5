"""Time one call alone in flight: its issue, the time to its answer, and the wait after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from fxlib.profiling.message_sizes import is_told, message_bytes, structure_of
from fxlib.profiling.samples import CallSample, Forward
from fxlib.runtime.ops.calls import is_call, is_wait, kind_of
from fxlib.runtime.ops.record import call_name, reached
from fxlib.runtime.tracking.ownership import as_it_is


def timed(node: Node, forward: Callable[[], Forward], made: dict[str, tuple[Any, ...]]) -> Callable[..., Any]:
    """Return a function that replaces the operator of a call, an issue or a wait, and notes its times in `forward()`.

    It also notes in `made` the arguments with which each call was last made.

    A call in its blocking form is issued and waited for. The answer of one that the program issues itself is awaited at
    the issue, so that nothing else is ever in flight.
    """
    kind, name = kind_of(node), call_name(node)
    operator: Callable[..., Any] = node.target  # type: ignore[assignment]
    assert kind is not None, node  # noqa: S101 - callers ask is_call, is_issue or is_wait first
    if is_wait(node):

        def waited(*args: Any) -> Any:
            return _waited(operator, args, forward().calls.get(name))

        return waited
    issue = kind.issue if is_call(node) else operator

    def alone(*args: Any, **kwargs: Any) -> Any:
        to, size = reached(node, args, kwargs), message_bytes((args, kwargs))
        made[name] = as_it_is(args)
        start, cpu_s = time.perf_counter(), time.thread_time()
        started = issue(*args, **kwargs)
        issued, cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        sample = CallSample(node=node, to=to, request_bytes=size, issue_s=issued - start, issue_cpu_s=cpu_s)
        forward().calls[name] = sample
        arrived = arrival(started)
        sample.service_s = max(0.0, arrived - issued) if arrived is not None else 0.0
        return _waited(kind.wait, (started,), sample, tells=arrived is not None) if is_call(node) else started

    return alone


def _waited(
    wait: Callable[..., Any], args: tuple[Any, ...], sample: CallSample | None, *, tells: bool | None = None
) -> Any:
    if tells is None:
        tells = bool(args) and hasattr(args[0], "add_done_callback")
    start, cpu_s = time.perf_counter(), time.thread_time()
    result = wait(*args)
    seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_s
    if sample is not None:
        if tells:
            sample.wait_s, sample.wait_cpu_s = seconds, cpu_s
        else:  # nothing tells when its answer arrives, so all of the wait counts as service
            sample.service_s = seconds
        sample.response_bytes, sample.returns = message_bytes(result), structure_of(result)
        sample.told = is_told(result)
    return result


def arrival(started: Any) -> float | None:
    """Block until an issued call is complete, and return the time of its completion; None if its future cannot tell."""
    if not hasattr(started, "add_done_callback"):
        return None
    at: list[float] = []
    done = threading.Event()

    def landed(_: object) -> None:
        at.append(time.perf_counter())
        done.set()

    started.add_done_callback(landed)
    done.wait()
    return at[0]
