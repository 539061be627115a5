"""Track gradients of remote results in a forward that runs as it was written: without a graph, by hooks on the calls.

All blocking idioms of `torch.distributed.rpc` go through one function of torch, `rpc.api._invoke_rpc`. While such a
forward runs, and in its thread alone, results of calls whose contract names a gradient take a gradient.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import rref_proxy
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import RPCExecMode

from fxlib.errors import ContractError, FxlibWarning
from fxlib.runtime import functions
from fxlib.runtime.dynamo import outside_of_dynamo
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.ops import contract_lookup, operators
from fxlib.runtime.ops.contract_lookup import method_called
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext
from fxlib.runtime.tracking.track import keep_gradients
from fxlib.spec.contract import Contract, contract_of

_METHODS = (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution)
_TRAINED: WeakKeyDictionary[nn.Module, AsWritten] = WeakKeyDictionary()
_FORWARDS: set[tuple[str, int]] = set()
"""The forwards of watched models, by the locations of their code, as TorchDynamo makes other code of it there."""
_GRAPHS: set[tuple[str, int]] = set()
"""The locations of the code that runs graphs, which track what they call by themselves."""
_RUNNING: dict[int, tuple[AsWritten, _Watch]] = {}
"""The running forwards of models that could not be captured, in all threads: model and watch, by the watch's id."""
_OURS = "fxlib_tracks_gradients"
"""The attribute that marks our wrapper of `rpc.api._invoke_rpc`, and wrappers that `functools.wraps` makes of it."""


class _Call(NamedTuple):
    """The arguments of `rpc.api._invoke_rpc`."""

    to: Any
    function: Any
    mode: Any
    args: Any
    kwargs: Any
    timeout: float


class _Thread(threading.local):
    """The watches of the forwards that each thread runs."""

    def __init__(self) -> None:
        self.watch: _Watch | None = None
        self.open: list[tuple[Any, _Watch | None]] = []
        """The context and the watch around each watched forward that has not ended."""
        self.direct: _Watch | None = None
        """The watch of the last forward that was called by its own name, and so ran no hooks."""
        self.is_sending = False
        """Whether a call is passing through our wrapper, which may be there twice if another tool lies in between."""

    def current(self) -> _Watch | None:
        """Return the watch of the forward that runs, after dropping watches of forwards that an interrupt has ended."""
        while self.watch is not None and self.watch.is_left():
            _RUNNING.pop(id(self.watch), None)
            THREAD.forward, self.watch = self.open.pop()
        return self.watch


_thread = _Thread()


@dataclass(slots=True)
class AsWritten:
    """A model that could not be captured, and still trains with `fxlib.push_gradients`."""

    name: str
    contracts: Mapping[str, Contract]
    tape: Tape = field(default_factory=Tape)
    calls: dict[str, bool] = field(default_factory=dict)
    """The remote calls that were made, and whether somebody has declared where all of their gradients go."""
    elsewhere: list[str] = field(default_factory=list)
    """The calls that other threads made while a forward ran, and whose gradients would have to be pushed."""
    pending: list[_Watch] = field(default_factory=list)
    """The watches of forwards that were called by their own name; whether these have ended is only seen on request."""
    hooked: bool = False
    """Whether forwards of the model are watched: it may call servers."""
    warned: bool = False
    beside: str = ""
    """The warning that is due once a method of the model runs its forward, if the model was captured; else empty."""

    def settle(self) -> None:
        """Note the pushes of forwards that were called by their own name and have ended."""
        if _FORWARDS:
            _observe()
        left = [each for each in self.pending if each.is_left()]
        self.pending = [each for each in self.pending if each not in left]
        for each in left:
            each.close()

    def tell(self) -> None:
        """Warn, once, if gradients of remote results are pushed nowhere."""
        lost = [name for name, declared in self.calls.items() if not declared]
        if self.warned or not (lost or self.elsewhere):
            return
        self.warned = True
        problems = []
        if lost:
            problems.append(
                f"gradients of what these calls return go nowhere: {', '.join(lost)}. Have a call block, and declare "
                'what takes its gradient: @fxlib.remote(gradient="my.ps:push").'
            )
        if self.elsewhere:
            problems.append(
                f"gradients of what other threads fetch while its forward runs are not pushed: "
                f"{', '.join(dict.fromkeys(self.elsewhere))}. Make these calls in the thread of the forward."
            )
        warnings.warn(f"{self.name} runs as it was written, and {' And '.join(problems)}", FxlibWarning, stacklevel=3)


class _Watch:
    """Watches the calls of one forward that runs as it was written.

    It begins and ends with a block (`tracked_calls`), or with the hooks of a model; until then it is the watch of its
    thread. A forward that was called by its own name runs no hooks: its calls find the watch by the forward's frame
    (`_of_direct_call`), and it is closed when somebody asks for the pushes after that frame has been left.
    """

    def __init__(
        self,
        tape: Tape,
        contracts: Mapping[str, Contract],
        calls: dict[str, bool] | None = None,
        frame: FrameType | None = None,
    ) -> None:
        self.forward = ForwardContext()
        self._tape = tape
        self._contracts = contracts
        self.calls = {} if calls is None else calls
        self.issued: list[str] = []
        """The calls that the program issues itself and whose results have gradients that would have to be pushed."""
        self.frame = frame
        """The frame that runs for as long as the forward does; None if the watch is ended whatever happens."""
        self.raising = sys.exc_info()[1]
        """The exception that was being handled when the forward began."""
        self._number_tracked = 0

    def begin(self) -> None:
        """Watch this thread from now on."""
        _observe()
        _thread.current()
        _thread.open.append((THREAD.forward, _thread.watch))
        THREAD.forward, _thread.watch = self.forward, self

    def end(self, *, completed: bool) -> None:
        """Stop watching; note the pushes if the forward came to its end."""
        THREAD.forward, _thread.watch = _thread.open.pop()
        _RUNNING.pop(id(self), None)
        if completed:
            self.note()

    def note(self) -> None:
        """Note the pushes of the forward on the tape."""
        if self.forward.tracked:
            self._tape.add(self.forward.tracked, self.forward.backward)
        self._tape.untracked = self.forward.untracked or self._tape.untracked

    def is_left(self) -> bool:
        """Return whether the forward is over, though nobody has ended the watch: no hooks ran, or an interrupt came."""
        if self.frame is None:
            return False
        running: FrameType | None = sys._getframe(1)
        while running is not None and running is not self.frame:
            running = running.f_back
        return running is None

    def close(self) -> None:
        """Note the pushes of a forward that was called by its own name, and let go of what it has made."""
        self.note()
        self.frame, self.forward = None, ForwardContext()  # they hold its values, and autograd's nodes

    def answer(self, future: Any, call: _Call) -> Any:
        """Return the future of a call; it tracks the result if a gradient is to be pushed for that."""
        mode, timeout = call.mode, call.timeout
        name, contract, to, args, kwargs = self.described(call)
        blocks = mode is RPCExecMode.SYNC
        self.calls[name] = contract is not None and (contract.gradient is None or blocks)
        if contract is None or contract.gradient is None:
            return future
        if not blocks:
            self.issued.append(name)
            return future
        limit = None if timeout == UNSET_RPC_TIMEOUT else timeout
        self._number_tracked += 1
        push = (to, contract.gradient, tuple(args or ()), dict(kwargs or {}), limit, self._number_tracked - 1)
        return _Answer(future, push, self.forward)

    def described(self, call: _Call) -> tuple[str, Contract | None, Any, Any, Any]:
        """Return the name of the called function, its contract, the server, and the arguments of the call."""
        to, function, _, args, kwargs, _ = call
        if function in _METHODS:
            to, method, args, kwargs = args
            return f".{method}", self._of_method(to, method), to, args, kwargs
        name, contract = self._of_function(function)
        if (called := method_called(function, tuple(args or ()))) is not None:
            own = contract_lookup.of_method_called(called.method, contract, self._contracts.get)
            if own is not contract:  # from here on, this is the method's call, as in a graph
                return called.method.__qualname__, own, called.rref, called.args, kwargs
        return name, contract, to, args, kwargs

    def _of_function(self, function: Any) -> tuple[str, Contract | None]:
        try:
            name = functions.name_of(function)
        except ContractError:
            return repr(function), contract_of(function)
        return name, contract_lookup.of_function(name, function, self._contracts.get)

    def _of_method(self, rref: Any, method: str) -> Contract | None:
        if (stated := self._contracts.get(f".{method}")) is not None:
            return stated
        kind = rref._get_type(blocking=False).wait()  # this is known, since the call has asked for it
        return contract_lookup.of_method(kind, method, self._contracts.get)


class _Answer:
    """The future of a blocking call whose result takes a gradient."""

    def __init__(self, future: Any, push: tuple[Any, ...], forward: ForwardContext) -> None:
        self._future = future
        self._push = push
        self._forward = forward

    @outside_of_dynamo
    def wait(self) -> Any:
        """Wait for the result, and track it; a program that pushes by itself still finds its `grad`."""
        answered = self._future.wait()
        outer, THREAD.forward = THREAD.forward, self._forward
        try:
            result = operators.track_gradient(answered, *self._push)
        finally:
            THREAD.forward = outer
        keep_gradients(result)
        return result


@contextmanager
def tracked_calls(tape: Tape, contracts: Mapping[str, Contract], reason: str) -> Iterator[None]:
    """Let results of remote calls that a block makes take gradients, and note on `tape` where these are to go.

    Args:
        tape: the tape for `fxlib.push_gradients`.
        contracts: contracts of functions that declare none, by name.
        reason: why the block runs in place of a graph; it is noted if the program issues such calls itself, since their
            results cannot be tracked.
    """
    watch, completed = _Watch(tape, contracts), False
    watch.begin()
    try:
        yield
        completed = True
    finally:
        watch.end(completed=completed)
        if watch.issued:
            tape.untracked = f"the original's own forward ran, which does not track what it issues itself: {reason}"


def train_as_written(model: nn.Module, contracts: Mapping[str, Contract], *, calls: bool = True) -> None:
    """Have `fxlib.push_gradients` push for a model that could not be captured, by hooks around its forward.

    Args:
        model: the model.
        contracts: contracts of functions that declare none, by name.
        calls: whether the model may call servers at all. If not, nothing is hooked until it is asked for again.
    """
    if (known := _TRAINED.get(model)) is None:
        known = _TRAINED[model] = AsWritten(type(model).__name__, contracts)
    known.contracts = contracts
    if not calls or known.hooked:
        return
    known.hooked = True
    _observe()
    if (forward := _forward_of(model)) is not None:
        _FORWARDS.add(_location_of(forward.__code__))
    if isinstance(model, torch.jit.ScriptModule):  # it takes no such hooks, and calls no function of Python's
        return
    if not any(hook is _begin for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(_begin, prepend=True)
        model.register_forward_hook(_end, always_call=True)


def train_beside(original: nn.Module, tape: Tape, contracts: Callable[[], Mapping[str, Contract]]) -> None:
    """Have `fxlib.push_gradients` push for forwards that a captured module's model runs itself, as in `model.loss(x)`.

    Args:
        original: the model, whose methods call its own forward.
        tape: the tape of the captured module.
        contracts: returns the contracts of functions that declare none, by name.
    """
    forward = _forward_of(original)
    if forward is None:
        return
    if (known := _TRAINED.get(original)) is None:
        known = _TRAINED[original] = AsWritten(type(original).__name__, contracts(), tape, hooked=True)
        known.beside = (
            f"a method of {known.name} runs the model's own forward, and not the captured one: its gradients are "
            "pushed, but its calls stay as they are written. Have the loop call the module itself."
        )
    if known.tape is not tape:
        known.settle()
        known.tape = tape
    _FORWARDS.add(_location_of(forward.__code__))
    _observe()


def _forward_of(model: nn.Module) -> FunctionType | None:
    """Return the function that computes a model's forward, below its decorators; calls in another kind are not seen."""
    forward: Any = getattr(type(model), "forward", None)
    found: Any = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    return found if isinstance(found, FunctionType) else None


def _location_of(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def track_themselves(code: CodeType) -> None:
    """Leave calls alone that come from some code, which tracks their results by itself."""
    _GRAPHS.add(_location_of(code))


@outside_of_dynamo
def _begin(module: nn.Module, _: Any) -> None:
    """Watch the forward that begins. A copy of the model has the hooks, too, but is not watched."""
    if (trained := _TRAINED.get(module)) is not None:
        watch = _Watch(trained.tape, trained.contracts, trained.calls, sys._getframe(1))
        watch.begin()
        _RUNNING[id(watch)] = (trained, watch)


@outside_of_dynamo
def _end(module: nn.Module, _: Any, __: Any) -> None:
    watch = _thread.watch
    if module in _TRAINED and watch is not None:
        watch.end(completed=sys.exc_info()[1] is watch.raising)


def as_written(modules: Iterable[nn.Module]) -> list[AsWritten]:
    """Return the records of those among some modules that could not be captured; each push asks, and mostly none is."""
    found = [each for module in modules if (each := _TRAINED.get(module)) is not None] if _TRAINED else []
    for each in found:
        is_watched = each.hooked or each.calls or each.pending  # or as another model of its class is
        if not (is_watched or each.warned) and rpc.api._is_current_rpc_agent_set():
            each.warned = True
            warnings.warn(
                f"{each.name} could not be captured, and was optimized where it could call no server, before init_rpc: "
                "gradients of its lookups are not pushed. Optimize it after init_rpc, or name the workload's servers.",
                FxlibWarning,
                stacklevel=3,
            )
    return found


def _of_direct_call() -> _Watch | None:
    """Return the watch of the forward that this thread runs without hooks, called as `model.forward(x)`."""
    found: tuple[FrameType, AsWritten] | None = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (location := _location_of(frame.f_code)) not in _GRAPHS:
        if location in _FORWARDS and (names := frame.f_code.co_varnames):
            trained = _trained(frame.f_locals.get(names[0]))
            if trained is not None and (found is None or found[1] is trained):
                found = frame, trained  # the outermost one: a forward may call that of its class's base
        frame = frame.f_back
    return None if found is None else _watch_of(*found)


def _watch_of(frame: FrameType, trained: AsWritten) -> _Watch:
    """Return the watch of the forward that runs in a frame; a new one at its first call."""
    watch = _thread.direct
    if watch is None or watch.frame is not frame:
        trained.settle()
        if trained.beside:
            warnings.warn(trained.beside, FxlibWarning, stacklevel=2)
            trained.beside = ""
        watch = _Watch(trained.tape, trained.contracts, trained.calls, frame)
        trained.pending.append(watch)
        _thread.direct = watch
    return watch


def _trained(value: object) -> AsWritten | None:
    return _TRAINED.get(value) if isinstance(value, nn.Module) else None


def _note_elsewhere(call: _Call) -> None:
    """Note a call of a thread that runs no forward of its own, while another thread runs one."""
    for trained, watch in list(_RUNNING.values()):
        name, contract, *_ = watch.described(call)
        if contract is None or contract.gradient is not None:
            trained.elsewhere.append(name)


def _observe() -> None:
    """Wrap torch's function, unless our wrapper is there; outside of a watched forward, it only calls the function.

    Another tool may have removed the wrapper: one that set its own before ours, and later put torch's function back.
    """
    plain: Any = rpc.api._invoke_rpc
    if _is_ours(plain) or _is_ours(inspect.unwrap(plain, stop=_is_ours)):
        return

    @outside_of_dynamo
    @functools.wraps(plain)
    def invoke(  # noqa: PLR0917 - torch's own signature
        to: Any, func: Any, rpc_type: Any, args: Any = None, kwargs: Any = None, rpc_timeout: float = UNSET_RPC_TIMEOUT
    ) -> Any:
        if _thread.is_sending:
            return plain(to, func, rpc_type, args, kwargs, rpc_timeout)
        try:
            _thread.is_sending = True
            future = plain(to, func, rpc_type, args, kwargs, rpc_timeout)
        finally:
            _thread.is_sending = False
        watch = _thread.current()
        if not torch.is_grad_enabled():
            return future
        call = _Call(to, func, rpc_type, args, kwargs, rpc_timeout)
        if watch is None:
            watch = _of_direct_call()
            if watch is None and _RUNNING:
                _note_elsewhere(call)
        elif THREAD.forward is not watch.forward:
            return future
        return future if watch is None else watch.answer(future, call)

    setattr(invoke, _OURS, True)
    rpc.api._invoke_rpc = invoke


def _is_ours(function: Any) -> bool:
    return getattr(function, _OURS, None) is True  # a mock has every attribute, but not with this value
