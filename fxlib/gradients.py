"""Pushing the gradients of remote results, from a captured module, original or rewritten."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from fxlib.errors import FxlibError
from fxlib.runtime.module import CapturedModule
from fxlib.runtime.ops import remote_call
from fxlib.runtime.pushes import Push
from fxlib.runtime.record import Recording, current_recording
from fxlib.runtime.walk import local_modules


def push_gradients(module: nn.Module) -> None:
    """Send the gradients of remote results to their servers: to be called after backward, in place of a loop of pushes.

    For each call whose contract names its gradient, calls `gradient(*args, result.grad, **kwargs)` where the result
    came from, blocking, in program order, forward by forward, and forgets them. Results without a gradient are passed
    over. What left from inside backward is waited for. Best called last in a step: what is under way then overlaps
    with the optimizer. An error of a push surfaces here, the first in program order; gradients behind it are not sent,
    as in a loop of one's own, except those that had left for other servers.

    Args:
        module: a captured module, original or rewritten, or a module that holds such (DistributedDataParallel).

    Raises:
        FxlibError: there is no captured module in `module`, or its last forward did not track gradients because the
            original's own forward ran.
        Exception: whatever a push raises.
    """
    captured = [each for _, each in local_modules(module) if isinstance(each, CapturedModule)]
    if not captured:
        raise FxlibError(
            "the module was not captured, so it does not know which gradients belong where",
            where=f"push_gradients({type(module).__name__})",
            hint="Call it with the module that fxlib.capture or client.optimize returned.",
        )
    untracked = next((each._fxlib.tape.untracked for each in captured if each._fxlib.tape.untracked), "")
    entries = [entry for each in captured for entry in each._fxlib.tape.take()]
    pending = [entry for entry in entries if entry.due]
    if untracked and not pending:
        raise FxlibError(
            f"the original's own forward ran, which does not track gradients of remote results: {untracked}",
            where=f"push_gradients({type(module).__name__})",
            hint="Capture the model in the state in which it trains.",
        )
    recording = current_recording()
    for entry in pending:
        if recording is None and entry.convoy is not None:
            entry.convoy.result(entry)
        else:
            _push(entry, recording)


def _push(push: Push, recording: Recording | None) -> None:
    call = push.call
    with recording.span("push", call.gradient, push.server) if recording is not None else nullcontext():
        if push.convoy is not None:
            push.convoy.result(push)
        else:
            remote_call(call.to, call.gradient, (*call.args, call.gradient_of_result()), call.kwargs, call.timeout_s)
