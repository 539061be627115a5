"""Watch every write of this process to a server, and every synchronization, while results may be fetched ahead.

All calls of `torch.distributed.rpc` from Python go through one of torch's functions, whatever alias a program has for
`rpc_sync` or `rpc_async`; `rpc.remote` goes through three. While anybody listens, these functions are replaced. The
contract of a call's function, or the contract that the graph states, says what the call writes; a function without one
may write anything. Listeners learn of a write before it is sent, and it counts as in flight until it is answered.

A collective, a barrier or an access to a store orders this process with others: the program sees afterwards what they
wrote before. So results that were read ahead are forgotten there. Whatever alias a program has for these operations,
they go through methods of `ProcessGroup`, `Work` and `Store`, which are replaced, too; the functional collectives begin
in C++, and are seen where their result is waited for. Operations inside a forward or a
backward belong to the step itself, and are left alone; so are those that this library makes on threads of its own.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed.rpc import api, rref_proxy

from fxlib import batch
from fxlib.analysis.effects.prologue import meet
from fxlib.analysis.effects.resources import ANY_STATE, ServerState, states_of
from fxlib.capture import builtin_contracts
from fxlib.errors import ContractError
from fxlib.runtime import functions
from fxlib.runtime.guards.dict_entries import DictEntries, table_of_class
from fxlib.runtime.ops.contract_lookup import method_called, of_method, of_method_called
from fxlib.runtime.ops.operators import server_name
from fxlib.runtime.tracking.forward_context import THREAD
from fxlib.spec.contract import Contract, contract_of

_NOTHING: frozenset[ServerState] = frozenset()
_NO_CONTRACTS: Mapping[Any, Contract] = {}
_METHODS = (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution)
"""How torch calls a method of the object behind an RRef."""
_QUESTIONS = (batch.echo, api._rref_typeof_on_owner)
_ANYTHING = frozenset({ANY_STATE})
_CREATIONS = ("_invoke_remote_builtin", "_invoke_remote_python_udf", "_invoke_remote_torchscript")
_COLLECTIVES = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "all_to_all_single", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("_reduce_scatter_base", "scatter", "send"),
)
"""Methods of a process group that begin a collective, or a message between two ranks."""
_STORE_ACCESSES = (
    *("add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get", "multi_set"),
    *("num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait"),
)
"""Methods of a store through which processes learn about each other."""


class _Thread(threading.local):
    is_own = False
    """Whether the thread's collectives and accesses to stores are this library's own."""


_THREAD = _Thread()


@contextmanager
def own_accesses() -> Iterator[None]:
    """Return a context in which this thread's collectives and stores are this library's, and order no writes."""
    before, _THREAD.is_own = _THREAD.is_own, True
    try:
        yield
    finally:
        _THREAD.is_own = before


class Listener(Protocol):
    """An object that keeps results that were read ahead."""

    def calls(self) -> None:
        """Settle whatever has to be over before this process makes another remote call."""

    def about_to_write(self, states: frozenset[ServerState]) -> None:
        """Wait for reads that may not run beside a write of these states."""

    def written(self, states: frozenset[ServerState]) -> None:
        """Forget results read from states that a call is about to write."""

    def synchronized(self) -> None:
        """Forget results that were read before other processes' writes were ordered with this process's next work."""


class _Write:
    """A write from before it is sent until it is answered."""

    __slots__ = ("future", "states", "thread")

    def __init__(self, states: frozenset[ServerState]) -> None:
        self.states = states
        self.thread = threading.get_ident()
        self.future: Any = None

    @property
    def over(self) -> bool:
        return self.future is not None and self.future.done()


class Watch:
    """Watches for as long as it has listeners."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._writes: list[_Write] = []
        self._stated: dict[str, Contract] = {}
        """Contracts that graphs state, by the function's name."""
        self._methods: dict[tuple[str, str], Contract] = {}
        """Contracts that graphs state for methods of objects behind RRefs, by the RRef in words and by ".method"."""
        self._known: dict[tuple[FunctionType, str], frozenset[ServerState]] = {}
        """States that functions write on a server by their declarations, under the contracts that are stated now."""
        self._replaced: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """torch's functions, by owner and name: the original, and its replacement."""
        self._places = DictEntries()
        """The places where the replacements are, as each batch asks whether they still are."""

    def add(
        self,
        listener: Listener,
        stated: Mapping[str, Contract] = _NO_CONTRACTS,
        methods: Mapping[tuple[str, str], Contract] = _NO_CONTRACTS,
    ) -> None:
        """Tell a listener about writes from now on, and trust the contracts that its graph states.

        Args:
            listener: the listener.
            stated: contracts by the function's name.
            methods: contracts of methods of objects behind RRefs, by the RRef in words and by ".method".
        """
        with self._lock:
            self._methods.update(methods)
            if any(self._stated.get(name) != contract for name, contract in stated.items()):
                self._stated.update(stated)
                self._known.clear()
            if listener not in self._listeners:
                self._listeners.append(listener)
            if not self._is_in_place():
                self._begin()

    def remove(self, listener: Listener) -> None:
        """Stop telling a listener about writes."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if self._listeners:
                return
            if self._is_in_place():  # else another wrapper around ours stays, and ours does nothing inside it
                for (owner, name), (original, _) in self._replaced.items():
                    setattr(owner, name, original)
                self._replaced.clear()
                self._places = DictEntries()  # it held what others had put in place of ours
            self._writes = [each for each in self._writes if not each.over]  # another loop may begin before they end
            self._stated.clear()
            self._methods.clear()
            self._known.clear()

    @property
    def is_watching(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def is_being_written(self, reads: Iterable[ServerState], *, but: Collection[object] = ()) -> bool:
        """Whether a write in flight may change what is read.

        Args:
            reads: the states that are read.
            but: writes that do not count, in the form of `in_flight`.
        """
        with self._lock:
            self._writes = [each for each in self._writes if not each.over]
            return any(meet(reads, each.states) for each in self._writes if each not in but)

    @property
    def in_flight(self) -> list[object]:
        """The writes in flight that this thread has made."""
        with self._lock:
            return [each for each in self._writes if each.thread == threading.get_ident()]

    def _is_in_place(self) -> bool:
        return bool(self._replaced) and self._places.holds()

    def _begin(self) -> None:
        self._places = DictEntries()
        call = api._invoke_rpc

        @functools.wraps(call)  # so that code that looks for the function below it finds it
        def watched(to: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            self.announce_call()
            sent = args[1] if len(args) > 1 else kwargs.get("args")
            states = self._written(to, func, sent or ()) if self._listeners else _NOTHING
            if not states:
                return call(to, func, *args, **kwargs)
            write = self.begin(states)
            try:
                write.future = call(to, func, *args, **kwargs)
            finally:
                self.end(write)
            return write.future

        self._replace(api, "_invoke_rpc", watched)
        for name in _CREATIONS:
            self._replace(api, name, self._creating(getattr(api, name)))
        if distributed.is_available():
            self._begin_synchronizations()

    def _begin_synchronizations(self) -> None:
        for name in _COLLECTIVES:  # some backends wait in them, others in the wait for their result
            self._synchronizes(distributed.ProcessGroup, name)
        self._synchronizes(distributed.Work, "wait")
        for name in _STORE_ACCESSES:
            self._synchronizes(distributed.Store, name)
        if functional := sys.modules.get("torch.distributed._functional_collectives"):
            self._synchronizes(functional, "wait_tensor")

    def _synchronizes(self, owner: Any, name: str) -> None:
        """Have listeners settle before a method runs, and forget their results after it."""
        original = getattr(owner, name, None)
        if original is None:  # another version of torch
            return

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._listeners or _is_within_a_step() or _THREAD.is_own:
                return original(*args, **kwargs)
            self.announce_call()
            found = original(*args, **kwargs)
            with self._lock:
                for each in list(self._listeners):
                    each.synchronized()
            return found

        self._replace(owner, name, watched)

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._replaced[owner, name] = inspect.getattr_static(owner, name), ours  # a class's own method, unbound
        setattr(owner, name, ours)
        table = table_of_class(owner) if isinstance(owner, type) else vars(owner)
        self._places.add(table, name, ours)

    def _creating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what replaces one of the functions of `rpc.remote`: it may write anything on a server."""

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.announce_call()
            if not self._listeners:
                return original(*args, **kwargs)
            write = self.begin(_ANYTHING)
            try:
                made = original(*args, **kwargs)
                write.future = made._get_future()
            finally:
                self.end(write)
            return made

        return watched

    def announce_call(self) -> None:
        """Have all listeners settle what has to be over before this process makes a remote call."""
        for each in list(self._listeners):  # without the lock: to settle means to wait for answers
            each.calls()

    def begin(self, states: frozenset[ServerState]) -> _Write:
        """Tell all listeners about a write that is about to be sent."""
        if not works_for_others():
            for each in list(self._listeners):  # without the lock: they may wait for answers
                each.about_to_write(states)
        write = _Write(states)
        with self._lock:
            self._writes.append(write)
            for each in list(self._listeners):
                each.written(states)
        return write

    def end(self, write: _Write) -> None:
        """Note that a write was sent, or could not be."""
        if write.future is None:
            with self._lock:
                self._writes.remove(write)

    def _written(self, to: Any, function: Any, args: Any) -> frozenset[ServerState]:
        """Return the states that a call writes."""
        server = server_name(to)
        calls = _calls_within(function, args)
        if calls is not None:
            found = _NOTHING
            for each, given, _ in calls:
                known = self._known.get((each, server)) if isinstance(each, FunctionType) else None
                states = self._written(to, each, given) if known is None else known
                if states is not found:  # most calls of a message are of one function
                    found |= states
            return found
        is_plain = isinstance(function, FunctionType)  # any other object may define `==` in its own way
        if is_plain and (known := self._known.get((function, server))) is not None:
            return known
        if _only_reads(function):
            return _NOTHING
        if function in _METHODS:
            return states_of(self._contract_of_method(*args[:2]), server)[1]
        if (called := method_called(function, tuple(args))) is not None:
            helpers = self._contract(function)
            contract = of_method_called(called.method, helpers, self._stated.get, builtin_contracts.of_method)
            return states_of(contract, server)[1]
        contract = self._contract(function)
        states = states_of(contract, server)[1]
        if is_plain and contract is not None:
            self._known[function, server] = states
        return states

    def _contract(self, function: Any) -> Contract | None:
        try:
            stated = self._stated.get(functions.name_of(function)) if self._stated else None
        except ContractError:
            stated = None
        return stated or contract_of(function)

    def _contract_of_method(self, rref: Any, method: str) -> Contract | None:
        """Return the contract of a method of the object behind an RRef, whose class the call has asked for."""
        if (stated := self._methods.get((str(rref), f".{method}"))) is not None:
            return stated
        kind = rref._get_type(blocking=False).wait()
        return of_method(kind, method, self._stated.get) or builtin_contracts.of_method(kind, method)


def _is_within_a_step() -> bool:
    """Whether this thread runs a forward of a captured module, or a backward."""
    return THREAD.forward is not None or torch._C._current_graph_task_id() != -1


def works_for_others() -> bool:
    """Whether this is a thread that Python did not start, as those in which calls of other processes run.

    Such a call may be made by the very server whose answer another thread waits for. So it must not wait for that.
    """
    return isinstance(threading.current_thread(), threading._DummyThread)


def _calls_within(function: Any, args: Any) -> Iterable[batch.Call] | None:
    """Return the calls that a message of `fxlib.batch` carries; None if it is a single call."""
    if function is batch.run or function is batch.run_in_order:
        calls: Iterable[batch.Call] = args[0]
        return calls
    return args[1] if function is batch.run_batched else None


def _only_reads(function: Any) -> bool:
    """Whether a function asks for the value behind an RRef, its class, or an echo, as the library and torch do."""
    if isinstance(function, operator.methodcaller):
        reduced: Any = function.__reduce__()
        return bool(reduced[1][0] == "local_value")
    return function in _QUESTIONS


WATCH = Watch()
"""The watch of this process: a write concerns all results that were read ahead, for whichever module."""
