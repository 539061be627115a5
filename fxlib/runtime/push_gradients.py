"""Push the gradients of remote results from a captured module, original or rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from fxlib.errors import FxlibError
from fxlib.runtime.ahead import Ahead
from fxlib.runtime.gradients.plain_forward import AsWritten, as_written
from fxlib.runtime.gradients.pushes import PushesInFlight, may_be_left, push_all, uninterrupted
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.module import CapturedModule
from fxlib.runtime.module_state import ModuleState
from fxlib.runtime.ops.timeline import current_recording
from fxlib.runtime.submodules import local_modules


def push_gradients(module: nn.Module) -> None:
    """Send the gradients of remote results to their servers; call this after backward, in place of a loop of pushes.

    For each call whose contract names its gradient, this calls `gradient(*args, result.grad, **kwargs)` on the server
    that returned the result, blocking, in program order, forward by forward, and then forgets the gradients. Results
    without a gradient are passed over. A rewritten module sends one message to each server, to all of them side by
    side, and waits for the answers: no message leaves before this call, and none is under way after it. If pushes fail,
    this raises the first error in program order; later pushes are not made, as in a loop of one's own, except those
    that had already left for other servers or other parts of the same server: a note on the error names them. An
    interrupt (Ctrl-C) takes effect when the pushes have been answered.

    If a step must not reach the servers (because its loss is not finite, say), call `drop_gradients` instead.

    Args:
        module: the result of `client.optimize`, or a captured module, original or rewritten; or a module that holds
            one (DistributedDataParallel). A model that could not be captured pushes for its blocking calls, and warns
            once about results whose gradients go nowhere.

    Raises:
        FxlibError: there is no such module in `module`, or its last forward was the original's own and issued calls
            itself, or ran within a transform of `torch.func`: its results are not tracked then.
        Exception: whatever a push raises.
    """
    tapes, written, aheads = _tapes(module, "push_gradients")
    for ahead in aheads:
        ahead.settle_pushes()
    untracked = next((tape.untracked for tape in tapes if tape.untracked), "")
    pending = [push for tape in tapes for push in tape.take()]
    for each in written:
        each.tell()
    if untracked and not pending:
        raise FxlibError(
            f"gradients of remote results are not there: {untracked}",
            where=f"push_gradients({type(module).__name__})",
            hint="Train by backward(), and capture the model in the state in which it trains.",
        )
    if not aheads:
        push_all(pending, current_recording())
        return
    leaves = len(aheads) == 1 and aheads[0].may_leave_pushes and may_be_left(pending)
    try:
        riders = [rider for ahead in aheads for rider in ahead.riders(pending)]
        if leaves:
            with uninterrupted():  # or nobody would wait for what was sent
                aheads[0].left(PushesInFlight(pending, current_recording(), riders))
            return
        push_all(pending, current_recording(), riders, lambda: _while_pushing(aheads))
    except BaseException:
        for ahead in aheads:
            ahead.drop()
        raise
    for ahead in aheads:
        ahead.pushed()


def _while_pushing(aheads: Sequence[Ahead]) -> None:
    for ahead in aheads:
        ahead.pushing()


def drop_gradients(module: nn.Module) -> None:
    """Forget the gradients of remote results that were not pushed; call this in place of `push_gradients`.

    Gradients accumulate from forward to forward until they are pushed, as those of parameters do until they are
    zeroed. A step that is skipped, because its loss is not finite or an error ended it, should therefore drop them; no
    server has seen any of them.

    Args:
        module: as for `push_gradients`.

    Raises:
        FxlibError: there is no captured module in `module`.
        Exception: whatever a push raises that a loop left in flight; the gradients are dropped nevertheless.
    """
    tapes, _, aheads = _tapes(module, "drop_gradients")
    try:
        for ahead in aheads:
            ahead.settle_pushes()
    finally:  # where an earlier push has failed, too
        for tape in tapes:
            tape.drop()
    for each in aheads:
        each.pushed()


@contextmanager
def gradients_left_out(module: nn.Module) -> Iterator[None]:
    """Let a block run forwards and backwards of a module whose gradients go to no server, then or later.

    Gradients that are due before the block are due after it.
    """
    _, _, tapes = _records(module)
    with ExitStack() as stack:
        for tape in tapes:
            stack.enter_context(tape.set_aside())
        stack.callback(_records, module)  # what the block has left to be noted is the block's, too
        yield


def _records(module: nn.Module) -> tuple[list[ModuleState], list[AsWritten], list[Tape]]:
    """Return the states of the captured modules within a module, the models that run as written, and all tapes.

    Forwards that are over are on their tapes then.
    """
    within = [each for _, each in local_modules(module)]
    states = [each._fxlib for each in within if isinstance(each, CapturedModule)]
    originals = [each.original for each in states if each.original is not None]
    written = as_written((*within, *originals))
    for each in written:
        each.settle()
    tapes = [each.tape for each in states] + [each.tape for each in written]
    return states, written, list(dict.fromkeys(tapes))


def _tapes(module: nn.Module, caller: str) -> tuple[list[Tape], list[AsWritten], list[Ahead]]:
    """Return the tapes of a module's forwards, the modules in it that run as written, and the calls made ahead."""
    states, written, tapes = _records(module)
    if not tapes:
        raise FxlibError(
            "the module was not captured, so it does not know which gradients belong where",
            where=f"{caller}({type(module).__name__})",
            hint="Call it with the module that fxlib.capture or client.optimize returned.",
        )
    return tapes, written, [each.ahead for each in states if each.ahead is not None]
