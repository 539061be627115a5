"""Parameter servers without a network: calls in flight run when an adversary pleases, on arguments as they then are.

It stands in for `torch.distributed.rpc`. A call in flight has not copied its arguments, runs at any moment before its
wait returns, and passes others on the way: whatever real timing can do, one of the adversary's seeds does, without
threads and without waiting.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import internal

import fxlib
from fxlib import batch
from fxlib.runtime import functions

SERVERS = ("ps0", "ps1")
State = dict[str, torch.Tensor]

_WORLD: list[World] = []


_OWN: State = {}
"""The state of this very process, where it is a real server."""


def first_state(server: str) -> State:
    place = SERVERS.index(server)
    return {"table": torch.full((2, 4), 0.3 + place), "count": torch.full((2, 4), 0.7 - place)}


def reset(server: str) -> None:
    """Put a real server's state back to the first one."""
    _OWN.update({name: tensor.requires_grad_() for name, tensor in first_state(server).items()})


def own_state() -> State:
    """Return a real server's state."""
    return {name: tensor.detach() for name, tensor in _OWN.items()}


def own_gradients(context: int) -> State:
    """Return the gradients that a context of distributed autograd has brought to a real server."""
    found = dist_autograd.get_gradients(context)
    return {name: found[tensor] for name, tensor in _OWN.items() if tensor in found}


def _state() -> State:
    if _WORLD:
        return _WORLD[-1].serving
    time.sleep(random.choice((0.0, 0.001, 0.003)))  # a real server: calls pass one another here
    return _OWN


@fxlib.remote(reads="table", gradient="tests.random_programs.simulation:push")
def lookup(x: torch.Tensor) -> torch.Tensor:
    return _state()["table"] * 0.5 + x.detach() * 0.25


@fxlib.remote(reads="count")
def count(x: torch.Tensor) -> torch.Tensor:
    return _state()["count"] + x.detach().sin()


@fxlib.remote(reads=["table", "count"])
def both(x: torch.Tensor) -> torch.Tensor:
    return _state()["count"] - _state()["table"] * x.detach()


@fxlib.remote(pure=True)
def pure(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cos() * 3


@fxlib.remote(writes="table")
def push(x: torch.Tensor, gradient: torch.Tensor | None = None) -> torch.Tensor:
    state = _state()
    state["table"] = state["table"] * 0.75 + x.detach().mean() + (0 if gradient is None else gradient)
    return state["table"] * 0.5


@fxlib.remote(writes="count", commutes=True)
def add(x: torch.Tensor) -> torch.Tensor:
    state = _state()
    state["count"] = state["count"] + x.detach().sign()
    return x.detach() * 2


def unknown(x: torch.Tensor) -> torch.Tensor:
    state = _state()
    state["table"], state["count"] = state["count"] + x.detach(), state["table"] * 0.5
    return state["table"] + state["count"]


@fxlib.remote(reads="table")
def failing_read(x: torch.Tensor) -> torch.Tensor:
    raise LookupError(f"no row {float(x.detach().sum()):.6f}")


@fxlib.remote(writes="count")
def failing_write(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"refused {float(x.detach().sum()):.6f}")


@fxlib.remote(reads="table")
def differentiable(x: torch.Tensor) -> torch.Tensor:
    return _state()["table"] * 0.5 + x.sin() * 0.25


@fxlib.remote(reads=["table", "count"])
def differentiable_product(x: torch.Tensor) -> torch.Tensor:
    state = _state()
    return state["table"] * state["count"] * x.cos()


DIFFERENTIABLE = (differentiable, differentiable_product)
READS = (lookup, count, both, pure)
WRITES = (push, add, unknown)
FAILING = (failing_read, failing_write)
for _function in (unknown,):
    functions.register(_function)


@dataclass(eq=False)
class Flying:
    """A call that has been issued; it runs when the adversary says so, or at the latest when somebody waits."""

    world: World
    server: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    landed: bool = False
    result: Any = None
    error: Exception | None = None
    callbacks: list[Callable[[Any], None]] = field(default_factory=list)

    def run(self) -> None:
        if self.landed:
            return
        self.landed = True
        self.world.serving = self.world.states[self.server]
        try:
            if self.server in self.world.dead:
                raise ConnectionError(f"{self.server} is gone")
            outcome = internal._run_function(internal.PythonUDF(self.function, self.args, self.kwargs))
            self.result = batch.result(outcome)
        except Exception as error:  # noqa: BLE001 - the caller's wait raises it
            self.error = error
        for callback in self.callbacks:
            callback(self)

    def wait(self) -> Any:
        self.world.stir()
        self.run()
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        self.world.stir()  # time passes
        return self.landed

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.landed:
            callback(self)
        else:
            self.callbacks.append(callback)


class World:
    """Some servers, and the calls in flight to them."""

    def __init__(self, seed: int) -> None:
        self._adversary = random.Random(seed)
        self._flying: list[Flying] = []
        self.states = {name: first_state(name) for name in SERVERS}
        self.serving: State = {}
        self.dead: set[str] = set()
        """Servers that have died: calls to them fail, those in flight among them."""

    def rpc_async(
        self, to: str, function: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = -1
    ) -> Flying:
        flying: Flying = rpc.api._invoke_rpc(to, function, None, args, kwargs, timeout)  # as torch's own does
        return flying

    def send(  # noqa: PLR0917 - as torch's own
        self, to: str, function: Callable[..., Any], mode: object, args: Any, kwargs: Any, timeout: float
    ) -> Flying:
        """Put a call in flight."""
        call = Flying(self, to, function, tuple(args or ()), dict(kwargs or {}))
        self._flying.append(call)
        self.stir()
        return call

    def rpc_sync(
        self, to: str, function: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = -1
    ) -> Any:
        return self.rpc_async(to, function, args, kwargs, timeout).wait()

    def stir(self) -> None:
        """Let some of the calls in flight run, in any order."""
        self._flying = [call for call in self._flying if not call.landed]
        eager = self._adversary.choice((0.0, 0.3, 1.0))
        landing = [call for call in self._flying if self._adversary.random() < eager]
        self._adversary.shuffle(landing)
        for call in landing:
            call.run()

    def drain(self) -> None:
        """Let all calls in flight run, latest first."""
        for call in reversed(self._flying):
            call.run()

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": value for name, state in self.states.items() for key, value in state.items()}


class _Agent:
    def get_worker_info(self) -> str:
        return "WorkerInfo"


@contextmanager
def simulated(seed: int) -> Iterator[World]:
    """Let `torch.distributed.rpc` reach a fresh simulated world."""
    world = World(seed)
    _WORLD.append(world)
    try:
        with (
            mock.patch.multiple(
                rpc, rpc_async=world.rpc_async, rpc_sync=world.rpc_sync, get_rpc_timeout=mock.Mock(return_value=60.0)
            ),
            mock.patch.object(rpc.api, "_invoke_rpc", world.send),
            mock.patch.object(internal, "_get_current_rpc_agent", _Agent),  # errors say whose they are
        ):
            yield world
            world.drain()
    finally:
        _WORLD.pop()
