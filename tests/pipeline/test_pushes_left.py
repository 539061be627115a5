"""Pushes that a loop leaves in flight are over before anything that may show them, and fail where that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import rpc

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.pipeline.module_ahead import ahead_of
from fxlib.pipeline.watch import WATCH
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.pushes import PushesInFlight, _Round
from tests.pipeline.clicks import Clicks, Stateful, batches, run, train
from tests.random_programs import simulation
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import look_up_table


class Table(nn.Module):
    """Looks up what it trains, on one server."""

    def __init__(self, function: Callable[..., torch.Tensor] = look_up_table) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("ps1", self._function, args=(x,)) * self.weight


class Pair(nn.Module):
    """Makes two lookups, which travel in one message within their forward, since a parameter decides what is sent."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = (x * self.weight).detach()
        found = rpc.rpc_sync("ps1", self._function, args=(sent,))
        return found + rpc.rpc_sync("ps1", self._function, args=(sent + 1,)) * self.weight


def scheduled(
    function: Callable[..., torch.Tensor], kind: Callable[[Callable[..., torch.Tensor]], nn.Module] = Table
) -> CapturedModule:
    """A program that sends its pushes together: others make them one by one, and wait for each."""
    found = fxlib.optimize(fxlib.capture(kind(function)))
    assert isinstance(found, CapturedModule)
    return found


def leave_after_one_step(module: CapturedModule) -> None:
    """Leave a loop, and a push of its first step in flight."""
    for x in fxlib.pipeline(batches(), module, defer_pushes=True):
        train(module, x)
        break


@fxlib.remote(writes="table")
def push_that_fails(x: torch.Tensor, gradient: torch.Tensor) -> None:
    raise ValueError(f"refused {float(x[0, 0]):.0f}")


@fxlib.remote(reads="table", gradient=f"{__name__}:push_that_fails")
def look_up_in_vain(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


DEEDS: dict[str, Callable[[nn.Module, Any], object]] = {
    "a forward": lambda module, _: module(torch.zeros(2, 4)),
    "a call of the loop": lambda _, __: rpc.rpc_sync("ps0", simulation.count, args=(torch.ones(2, 4),)),
    "a state dict": lambda module, _: nn.Sequential(module).state_dict(),
    "the next pushes": lambda module, _: fxlib.push_gradients(module),
    "no pushes": lambda module, _: fxlib.drop_gradients(module),
    "the pipeline's state": lambda _, loop: loop.state_dict(),
    "a key of a store": lambda _, __: distributed.HashStore().set("step", "1"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_pushes_left_in_flight_are_over_before_anything_that_may_show_them(deed: str) -> None:
    module = scheduled(look_up_table)
    finished = mock.patch.object(PushesInFlight, "finish", autospec=True, side_effect=PushesInFlight.finish)
    with simulated(5), finished as finish:
        loop = fxlib.pipeline(Stateful(), module, ahead=True, defer_pushes=True)
        for place, x in enumerate(loop):
            train(module, x)
            assert finish.call_count == place  # those of this step are in flight
            if place == 1:
                DEEDS[deed](module, loop)
                assert finish.call_count == 2, deed
    assert finish.call_count == 4


@pytest.mark.parametrize("seed", range(2))
def test_pushes_left_in_flight_send_what_their_arguments_held(seed: int) -> None:
    module = scheduled(look_up_table)

    def table(*, defer_pushes: bool) -> torch.Tensor:
        buffer = torch.zeros(2, 4)  # a loader that uses its memory again
        with simulated(seed) as world:
            loader = (buffer.fill_(place) for place in range(4))
            for x in fxlib.pipeline(loader, module, defer_pushes=defer_pushes):
                train(module, x)
                buffer.fill_(9.0)
            return world.states["ps1"]["table"]

    assert torch.equal(table(defer_pushes=True), table(defer_pushes=False))


def test_a_failed_push_that_was_left_in_flight_is_raised_later_and_names_its_step() -> None:
    module = scheduled(look_up_in_vain)
    seen: list[float] = []

    def step(x: torch.Tensor) -> None:
        seen.append(float(x[0, 0]))
        train(module, x)

    with simulated(5), pytest.raises(ValueError, match="refused 0") as raised:
        run(fxlib.pipeline(batches(), module, defer_pushes=True), step)
    assert seen == [0.0, 1.0]  # the second forward has waited
    assert any("a push of step 1 of the loop" in note for note in raised.value.__notes__)


def test_a_failed_push_is_raised_by_the_next_calls_that_travel_in_one_message() -> None:
    module = scheduled(look_up_in_vain, Pair)
    with simulated(5), pytest.raises(ValueError, match="refused 0"):
        run(fxlib.pipeline(batches(), module, defer_pushes=True), lambda x: train(module, x))


@pytest.mark.parametrize(
    "deed",
    [fxlib.push_gradients, lambda module: fxlib.prefetch(module, torch.ones(2, 4))],
    ids=["pushes", "a prefetch"],
)
def test_a_failed_push_is_raised_by_what_another_module_sends(deed: Callable[[nn.Module], object]) -> None:
    module, pair, clicks = scheduled(look_up_in_vain), scheduled(look_up_table, Pair), fxlib.capture(Clicks())
    with simulated(5):
        pair(torch.ones(2, 4)).sum().backward()
        loop = iter(fxlib.pipeline(batches(), module, defer_pushes=True))
        train(module, next(loop))
        with pytest.raises(ValueError, match="refused 0"):
            deed(pair if deed is fxlib.push_gradients else clicks)
        loop.close()  # type: ignore[attr-defined]


def test_the_last_pushes_of_a_loop_raise_at_its_end() -> None:
    module = scheduled(look_up_in_vain)
    with simulated(5), pytest.raises(ValueError, match="refused 0"):
        run(fxlib.pipeline(batches(1), module, defer_pushes=True), lambda x: train(module, x))


def test_of_a_loop_that_is_left_a_failed_push_is_told_and_raised_by_the_next_pushes() -> None:
    module = scheduled(look_up_in_vain)
    with simulated(5):
        with pytest.warns(FxlibWarning, match="(?s)a push has failed that a loop left in flight.*refused 0"):
            leave_after_one_step(module)
        with pytest.raises(ValueError, match="refused 0"):
            fxlib.push_gradients(module)
        fxlib.push_gradients(module)


def test_gradients_are_dropped_where_an_earlier_push_has_failed_too() -> None:
    module = scheduled(look_up_in_vain)
    with simulated(5):
        with pytest.warns(FxlibWarning, match="a push has failed"):
            leave_after_one_step(module)
        module(batches()[0]).sum().backward()
        with pytest.raises(ValueError, match="refused"):
            fxlib.drop_gradients(module)
        fxlib.push_gradients(module)  # there is nothing to push, and so nothing that fails


def test_an_interrupt_while_a_loop_closes_leaves_no_loop_open() -> None:
    module = scheduled(look_up_table)
    interrupted = mock.patch.object(PushesInFlight, "finish", side_effect=KeyboardInterrupt)
    with simulated(5):
        loop = iter(fxlib.pipeline(batches(), module, defer_pushes=True))
        train(module, next(loop))
        with interrupted, pytest.raises(KeyboardInterrupt):
            loop.close()  # type: ignore[attr-defined]
        ahead = module._fxlib.ahead
        assert ahead is not None
        assert not ahead.may_leave_pushes
        assert not WATCH.is_watching


def test_an_interrupt_while_pushes_are_sent_leaves_them_to_be_waited_for() -> None:
    module, begin = scheduled(look_up_table), _Round.begin

    def interrupted_begin(pushes: _Round) -> None:
        begin(pushes)
        signal.raise_signal(signal.SIGINT)

    finished = mock.patch.object(PushesInFlight, "finish", autospec=True, side_effect=PushesInFlight.finish)
    with simulated(5), finished as finish:
        loop = iter(fxlib.pipeline(batches(), module, defer_pushes=True))
        with mock.patch.object(_Round, "begin", interrupted_begin), pytest.raises(KeyboardInterrupt):
            train(module, next(loop))
        rpc.rpc_sync("ps0", simulation.count, args=(torch.ones(2, 4),))
        assert finish.call_count == 1
        loop.close()  # type: ignore[attr-defined]


def test_a_loop_that_begins_with_a_failed_push_of_the_one_before_raises_it_and_leaves_nothing_open() -> None:
    module = scheduled(look_up_in_vain)
    with simulated(5):
        with pytest.warns(FxlibWarning, match="a push has failed"):
            leave_after_one_step(module)
        with pytest.raises(ValueError, match="refused 0"):
            run(fxlib.pipeline(batches(), module), lambda x: train(module, x))
        assert ahead_of(module)._loops == 0
        assert ahead_of(module)._trainers._stated == []


def test_while_one_thread_waits_for_pushes_no_other_takes_them_for_over() -> None:
    module = scheduled(look_up_table)
    waiting, answered = threading.Event(), threading.Event()
    finish = PushesInFlight.finish

    def slowly(pushes: PushesInFlight, *args: Any) -> Any:
        waiting.set()
        assert answered.wait(10)
        return finish(pushes, *args)

    def heartbeat() -> None:
        rpc.rpc_sync("ps0", simulation.count, args=(torch.ones(2, 4),))

    with simulated(5), mock.patch.object(PushesInFlight, "finish", slowly):
        loop = iter(fxlib.pipeline(batches(2), module, defer_pushes=True))
        train(module, next(loop))
        beat = threading.Thread(target=heartbeat)
        beat.start()
        assert waiting.wait(10)
        batch, seen = next(loop), list[torch.Tensor]()
        forward = threading.Thread(target=lambda: seen.append(module(batch)))
        forward.start()
        forward.join(0.2)
        assert not seen  # it waits, too
        answered.set()
        forward.join(10)
        beat.join(10)
        assert len(seen) == 1
        del loop
