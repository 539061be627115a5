"""Pushes and prefetches of another thread: whatever it does beside the loop's, rows are those of the plain loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import fxlib
from fxlib.pipeline.module_ahead import ModuleAhead
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.pushes import PushMessage
from tests.pipeline.test_by_keys import captured, plain
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import look_up_decayed, look_up_momentum, look_up_rows

KEYS = [torch.tensor([1, 2, 3]) for _ in range(4)]
BY_TURNS = [torch.tensor(keys) for keys in ([1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6])]
"""Each batch but the first two has the keys of the push beside which it is pulled."""


def programs(function: Callable[..., torch.Tensor] = look_up_rows) -> list[CapturedModule]:
    found = fxlib.optimize(captured(function))
    assert isinstance(found, CapturedModule)
    return [captured(function), found]


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("begins_while_reads_are_sent", [False, True])
def test_a_batch_that_is_pulled_beside_a_push_of_another_thread_is_read_as_in_the_plain_loop(
    begins_while_reads_are_sent: bool,
) -> None:
    expected, state = plain(BY_TURNS)
    prepare, make = ModuleAhead.riders, ModuleAhead._make
    begins, prepared, pulled = threading.Event(), threading.Event(), threading.Event()

    def riders(ahead: ModuleAhead, pushes: Sequence[Any]) -> Any:
        found = prepare(ahead, pushes)
        prepared.set()
        assert pulled.wait(10)
        return found

    def meanwhile(ahead: ModuleAhead, *args: Any, **kwargs: Any) -> None:
        if begins_while_reads_are_sent and not begins.is_set():
            begins.set()
            prepared.wait(0.2)  # in vain: these reads are sent first
        make(ahead, *args, **kwargs)

    def push(module: CapturedModule) -> None:
        assert begins.wait(10)
        fxlib.push_gradients(module)

    for module in programs():
        with (
            simulated(5) as world,
            mock.patch.multiple(ModuleAhead, riders=riders, _make=meanwhile),
            ThreadPoolExecutor(1) as threads,
        ):
            loop = iter(fxlib.pipeline(BY_TURNS, module))
            begins.set()
            keys, found = next(loop, None), list[torch.Tensor]()
            while keys is not None:
                output = module(keys)
                output.sum().backward()
                found.append(output.detach())
                for each in (begins, prepared, pulled):
                    each.clear()
                pushed = threads.submit(push, module)
                if not begins_while_reads_are_sent:
                    begins.set()
                    assert prepared.wait(10)
                keys = next(loop, None)
                world.drain()  # what was read by now lacks the push
                begins.set()
                pulled.set()
                pushed.result(10)
            assert all(map(torch.equal, found, expected))
            assert all(torch.equal(state[name], world.states["ps0"][name]) for name in state)


def test_rows_of_a_forward_beside_a_push_of_another_thread_are_not_updated_by_its_own_push() -> None:
    """They are of before the first push, and the second one finds other rows on the server."""

    def outputs(*, under_a_pipeline: bool) -> list[torch.Tensor]:
        module, ended = captured(look_up_momentum), ModuleAhead.ended

        def pushed_meanwhile(ahead: ModuleAhead) -> None:
            if len(found) == 1:
                threads.submit(fxlib.push_gradients, module).result(10)
            ended(ahead)

        found = list[torch.Tensor]()
        with (
            simulated(5),
            ThreadPoolExecutor(1) as threads,
            mock.patch.object(ModuleAhead, "ended", pushed_meanwhile),
        ):
            for keys in fxlib.pipeline(KEYS, module, depth=2) if under_a_pipeline else KEYS:
                output = module(keys)
                if len(found) == 1 and not under_a_pipeline:
                    fxlib.push_gradients(module)
                output.sum().backward()
                if found:
                    fxlib.push_gradients(module)
                found.append(output.detach())
        return found

    assert all(map(torch.equal, outputs(under_a_pipeline=True), outputs(under_a_pipeline=False)))


def test_pushes_of_two_threads_at_a_time_leave_reads_to_their_forwards() -> None:
    _, module = programs(look_up_decayed)
    prepare, receive, end = ModuleAhead.riders, PushMessage.outcomes, ModuleAhead.pushed
    others, prepared, received = list[Future[None]](), threading.Event(), threading.Event()

    def push() -> None:
        module(KEYS[0]).sum().backward()
        fxlib.push_gradients(module)

    def riders(ahead: ModuleAhead, pushes: Sequence[Any]) -> Any:
        found = prepare(ahead, pushes)
        if not is_main():
            prepared.set()
            assert received.wait(10)
        return found

    def outcomes(message: PushMessage) -> Any:
        if is_main() and not others:
            others.append(threads.submit(push))
            assert prepared.wait(10)
        return receive(message)

    def pushed(ahead: ModuleAhead) -> None:
        received.set()
        if is_main():
            others[0].result(10)
        end(ahead)

    with (
        simulated(5),
        ThreadPoolExecutor(1) as threads,
        mock.patch.multiple(ModuleAhead, riders=riders, pushed=pushed),
        mock.patch.object(PushMessage, "outcomes", outcomes),
    ):
        loop = iter(fxlib.pipeline(KEYS, module))
        module(next(loop)).sum().backward()
        fxlib.push_gradients(module)
        keys = next(loop)
        assert torch.equal(module(keys), module(keys.clone()))
        loop.close()  # type: ignore[attr-defined]
