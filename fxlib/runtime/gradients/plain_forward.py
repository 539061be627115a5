"""Gradients of remote results where a forward runs as it was written: no graph notes them, so the calls themselves do.

All blocking idioms of `torch.distributed.rpc` go through one function of torch's, `rpc.api._invoke_rpc`. While such a
forward runs, in its thread alone, the results of calls whose contract names a gradient take one.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import rref_proxy
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import RPCExecMode

from fxlib.errors import ContractError, FxlibWarning
from fxlib.runtime import functions, ops
from fxlib.runtime.forward_context import THREAD, Flight
from fxlib.runtime.gradients.tape import Tape
from fxlib.spec.contract import Contract, contract_of
from fxlib.utils.pytree import leaves

_METHODS = (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution)
_TRAINED: WeakKeyDictionary[nn.Module, AsWritten] = WeakKeyDictionary()


class _Call(NamedTuple):
    """The arguments of torch's function."""

    to: Any
    function: Any
    mode: Any
    args: Any
    kwargs: Any
    timeout: float


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watch: _Watch | None = None
        self.open: list[tuple[Any, _Watch | None]] = []
        """What was before each watched forward that has not ended."""

    def current(self) -> _Watch | None:
        """Return the watch of the forward that runs; one that an interrupt ended has been left behind."""
        while self.watch is not None and self.watch.caller is not None and not _is_running(self.watch.caller):
            THREAD.flight, self.watch = self.open.pop()
        return self.watch


_thread = _Thread()


@dataclass(slots=True)
class AsWritten:
    """A model that could not be captured, and trains with `fxlib.push_gradients` all the same."""

    name: str
    contracts: Mapping[str, Contract]
    tape: Tape = field(default_factory=Tape)
    calls: dict[str, bool] = field(default_factory=dict)
    """The remote calls that were made, and whether all gradients go where somebody has declared."""
    told: bool = False

    def tell(self) -> None:
        """Warn, once, if gradients of remote results are pushed nowhere."""
        lost = [name for name, declared in self.calls.items() if not declared]
        if self.told or not lost:
            return
        self.told = True
        warnings.warn(
            f"{self.name} was not captured, and gradients of what these calls return go nowhere: {', '.join(lost)}. "
            'Have a call block, and declare what takes its gradient: @fxlib.remote(gradient="my.ps:push").',
            FxlibWarning,
            stacklevel=3,
        )


class _Watch:
    """What one forward, which runs as it was written, calls."""

    def __init__(self, tape: Tape, contracts: Mapping[str, Contract], calls: dict[str, bool] | None = None) -> None:
        self.flight = Flight()
        self._tape = tape
        self._contracts = contracts
        self.calls = {} if calls is None else calls
        self.issued: list[str] = []
        """Calls that the program issues itself, gradients of whose results would have to be pushed."""
        self.caller: FrameType | None = None
        """What runs for as long as the forward does; None where the watch is ended whatever happens."""
        self.raising = sys.exc_info()[1]
        """What was being handled when the forward began."""
        self._index = 0

    def begin(self) -> None:
        """Watch this thread from now on."""
        _observe()
        _thread.current()
        _thread.open.append((THREAD.flight, _thread.watch))
        THREAD.flight, _thread.watch = self.flight, self

    def end(self, *, completed: bool) -> None:
        """Stop watching; note what is to be pushed, if the forward came to its end."""
        THREAD.flight, _thread.watch = _thread.open.pop()
        if completed and self.flight.tracked:
            self._tape.add(self.flight.tracked, self.flight.backward)

    def answer(self, future: Any, call: _Call) -> Any:
        """Return the future of a call; one that tracks the result where a gradient is to be pushed for it."""
        to, function, mode, args, kwargs, timeout = call
        if function in _METHODS:
            to, method, args, kwargs = args
            name, contract = f".{method}", self._of_method(to, method)
        else:
            name, contract = self._of_function(function)
        blocks = mode is RPCExecMode.SYNC
        self.calls[name] = contract is not None and (contract.gradient is None or blocks)
        if contract is None or contract.gradient is None:
            return future
        if not blocks:
            self.issued.append(name)
            return future
        limit = None if timeout == UNSET_RPC_TIMEOUT else timeout
        self._index += 1
        return _Answer(future, (to, contract.gradient, tuple(args or ()), dict(kwargs or {}), limit, self._index - 1))

    def _of_function(self, function: Any) -> tuple[str, Contract | None]:
        try:
            name = functions.name_of(function)
        except ContractError:
            return repr(function), contract_of(function)
        return name, self._contracts.get(name) or contract_of(function)

    def _of_method(self, rref: Any, method: str) -> Contract | None:
        if (stated := self._contracts.get(f".{method}")) is not None:
            return stated
        kind = rref._get_type(blocking=False).wait()  # known: the call has asked for it
        for base in kind.__mro__:
            if method in base.__dict__:
                stated = self._contracts.get(f"{base.__module__}:{base.__qualname__}.{method}")
                return stated or contract_of(base.__dict__[method]) or contract_of(getattr(base, method))
        return None


class _Answer:
    """The future of a blocking call, whose result takes a gradient."""

    def __init__(self, future: Any, push: tuple[Any, ...]) -> None:
        self._future = future
        self._push = push

    def wait(self) -> Any:
        """Wait for the result, and track it; a program that pushes by itself finds its `grad` all the same."""
        result = ops.track_gradient(self._future.wait(), *self._push)
        for _, each in leaves(result):
            if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf:
                each.retain_grad()
        return result


@contextmanager
def tracked_calls(tape: Tape, contracts: Mapping[str, Contract], reason: str) -> Iterator[None]:
    """Let results of remote calls that a block makes take gradients, and note on `tape` where these are to go.

    Args:
        tape: for `fxlib.push_gradients`.
        contracts: of functions that declare none, by name.
        reason: why the block runs in place of a graph; noted where the program issues such calls itself, whose results
            cannot be tracked.
    """
    watch, completed = _Watch(tape, contracts), False
    watch.begin()
    try:
        yield
        completed = True
    finally:
        watch.end(completed=completed)
        if watch.issued:
            tape.untracked = reason


def train_as_written(model: nn.Module, contracts: Mapping[str, Contract], *, calls: bool = True) -> None:
    """Have `fxlib.push_gradients` push for a model that could not be captured, by hooks around its forward.

    Args:
        model: the model.
        contracts: of functions that declare none, by name.
        calls: whether it may call servers at all. If not, nothing is hooked, and there is nothing to push.
    """
    if (known := _TRAINED.get(model)) is not None:
        known.contracts = contracts
        return
    _TRAINED[model] = AsWritten(type(model).__name__, contracts)
    if calls and not any(hook is _begin for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(_begin, prepend=True)
        model.register_forward_hook(_end, always_call=True)


def _begin(module: nn.Module, _: Any) -> None:
    """Watch the forward that begins. A copy of the model, which has the hooks as well, was not asked about."""
    if (trained := _TRAINED.get(module)) is not None:
        watch = _Watch(trained.tape, trained.contracts, trained.calls)
        watch.begin()
        watch.caller = sys._getframe(1)


def _end(module: nn.Module, _: Any, __: Any) -> None:
    watch = _thread.watch
    if module in _TRAINED and watch is not None:
        watch.end(completed=sys.exc_info()[1] is watch.raising)


def _is_running(caller: FrameType) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def as_written(module: nn.Module) -> AsWritten | None:
    """Return what is known of a model that could not be captured; None of any other module."""
    return _TRAINED.get(module)


@functools.cache
def _observe() -> None:
    """Put torch's function aside, once; outside of a watched forward, this one does what that did."""
    plain = rpc.api._invoke_rpc

    @functools.wraps(plain)
    def invoke(  # noqa: PLR0917 - torch's own signature
        to: Any, func: Any, rpc_type: Any, args: Any = None, kwargs: Any = None, rpc_timeout: float = UNSET_RPC_TIMEOUT
    ) -> Any:
        future = plain(to, func, rpc_type, args, kwargs, rpc_timeout)
        watch = _thread.current()
        if watch is None or THREAD.flight is not watch.flight or not torch.is_grad_enabled():
            return future
        return watch.answer(future, _Call(to, func, rpc_type, args, kwargs, rpc_timeout))

    rpc.api._invoke_rpc = invoke
