"""Record remote calls: each, whatever its idiom, becomes one node that calls an operator of `fxlib.runtime`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch.distributed import rpc
from torch.fx import Node, Proxy
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxlib.capture.declarations import Declarations
from fxlib.capture.handled_errors import capture_error, clean_up, guarding_handler
from fxlib.capture.intercept import suspended
from fxlib.capture.recording.record import VALUES
from fxlib.capture.trace.values import FutureValue, RRefCalls, StructuredValue, TracedValue, value_of
from fxlib.errors import CaptureError, ContractError
from fxlib.runtime import functions, is_wait, ops
from fxlib.runtime.ops.calls import CallKind, kind_of
from fxlib.runtime.ops.contract_lookup import GIVEN, MethodCall, method_called
from fxlib.spec.contract import Contract, contract_of

Style = Literal["sync", "async", "remote"]
METHOD_ARGUMENTS = "method_arguments"
"""Key in a call's `meta` for the index of the first argument of the method that the called helper calls."""
_CONTAINERS = frozenset({list, tuple, dict, slice, immutable_list, immutable_dict})
_OPERATORS = {"sync": ops.remote_call, "async": ops.start_call, "remote": ops.create}


class Recorder(Protocol):
    """The part of the tracer that the recording of remote calls uses."""

    end: FrameType | None
    """The frame at which the user's frames end."""

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
    ) -> Proxy:
        """Append a node."""

    def constant(self, value: object, hint: str) -> Proxy:
        """Return the node that reads an object kept beside the graph."""

    def rref(self, value: Any) -> Proxy:
        """Return the node that reads a live RRef."""


class Watcher(Protocol):
    """The receiver of the objects among the arguments of calls."""

    def sent(self, value: Any, *, by_client: bool = False) -> None:
        """Note the contents of an object that is kept beside the graph."""

    def opened(self, container: Any) -> None:
        """Note the contents of a container whose elements become arguments one by one."""


class RemoteCalls:
    """Records the remote calls of one capture.

    Args:
        tracer: the maker of the nodes.
        declarations: the finder of the contracts.
        watcher: the receiver of the objects among the arguments.
    """

    def __init__(self, tracer: Recorder, declarations: Declarations, watcher: Watcher) -> None:
        self._tracer = tracer
        self._watcher = watcher
        self._declarations = declarations
        self._tracked = 0
        self._sent: dict[str, Proxy] = {}

    def forget(self) -> None:
        """Drop all references to the objects of one capture."""
        self._declarations.__dict__.clear()
        self.__dict__.clear()

    def call(
        self, style: Style, to: Any, function: Any, args: Any = None, kwargs: Any = None, *, timeout: Any = None
    ) -> Any:
        """Record `rpc_sync`, `rpc_async` or `remote`, called with these arguments."""
        for each in (args, kwargs):
            self._watcher.opened(each)
        function, args, kwargs = _unfold(function, _sequence(args), dict(kwargs or {}))
        if _is_remote_forward(function, args):
            return self.method_call(style, args[0], "forward", args[3:], kwargs, timeout=timeout)
        try:
            name = functions.register(function)
        except ContractError as error:
            raise _refused("cannot call this function remotely", error) from error
        contract, through = self._declarations.of_function(name, function, kwargs), None
        if (called := method_called(function, args)) is not None:
            own = self._declarations.of_method_called(called.method, contract)
            contract, through = own, (called if own is not contract else None)
        call = (self._destination(to), name, self.values(args), self.values(kwargs), _seconds(timeout))
        created = functools.partial(self._declarations.note_created, function)
        return self._record(style, call, contract, created, through)

    def method_call(
        self, style: Style, rref: Any, method: str, args: tuple[Any, ...], kwargs: Any, *, timeout: Any = None
    ) -> Any:
        """Record a call of a method of the object behind an RRef."""
        to = rref if isinstance(rref, Proxy) else self._tracer.rref(rref)
        holder = str(to.node.target) if to.node.op in ("get_attr", "placeholder") else ""
        contract = self._declarations.of_method(rref, method, holder)
        call = (to, f".{method}", self.values(args), self.values(kwargs), _seconds(timeout))
        return self._record(style, call, contract, None)

    def method_calls(
        self, style: Style, rref: Any, timeout: Any = None, *, then: Callable[[Any], Any] = lambda made: made
    ) -> RRefCalls:
        """Return the helper that `rref.rpc_sync()` and the like return; `then` converts the results of its calls."""
        return RRefCalls(lambda method, *call: then(self.method_call(style, rref, method, *call, timeout=timeout)))

    def contract_of_client(self, kind: CallKind) -> Contract | None:
        """Return the contract of a registered client's calls, or None if it is unknown."""
        return self._declarations.of_client(kind)

    def fetch(self, rref: Any, timeout: Any = None) -> Proxy:
        """Record `rref.to_here()`."""
        contract = self._declarations.of_value(rref)
        self._declarations.note_fetched(rref)
        proxy = rref if isinstance(rref, Proxy) else self._tracer.rref(rref)
        result = self.emit(ops.fetch, (proxy, _seconds(timeout)), "fetch", contract)
        return value_of(result, contract.structure if contract is not None else None)

    def own(self, value: Any) -> Proxy:
        """Record `rpc.RRef(value)`, which refers to this process itself."""
        return self._tracer.create_proxy("call_function", ops.make_rref, (self._value(value),), {}, name="rref")

    def _record(
        self,
        style: Style,
        call: tuple[Any, ...],
        contract: Contract | None,
        created: Callable[[Node, Contract | None], None] | None,
        through: MethodCall | None = None,
    ) -> Any:
        hint = call[1].replace(":", ".").rpartition(".")[2]
        node_name = {"sync": hint, "async": f"issue_{hint}", "remote": f"create_{hint}"}[style]
        # An RRef's `rpc_async` asks the owner for the object's class first, and leaves all errors to the future.
        late = style == "async" and call[1].startswith(".")
        proxy = self.emit(ops.issue_call if late else _OPERATORS[style], call, node_name, contract)
        if through is not None:  # from here on, the arguments and the gradient are those of the method's call
            proxy.node.meta[METHOD_ARGUMENTS] = GIVEN
            call = (call[2][1], f".{through.method.__name__}", call[2][GIVEN:], *call[3:])
        if style == "async":
            return FutureValue(proxy.node, proxy.tracer, lambda future: self._wait(future, call, contract))
        if style == "remote":
            if created is not None:
                created(proxy.node, contract)
            return proxy
        return self._result(proxy, call, contract)

    def _wait(self, future: Proxy, call: tuple[Any, ...], contract: Contract | None) -> Proxy:
        return self._result(self.emit_wait(ops.wait, future), call, contract)

    @staticmethod
    def called(node: Node) -> str:
        """Return the name of the function whose result a node is, whether the node is a call or the wait for one."""
        made = node.args[0] if is_wait(node) else node
        if isinstance(made, Node) and (made.target in _OPERATORS.values() or made.target is ops.issue_call):
            return str(made.args[1])
        kind = kind_of(node)
        return "" if kind is None else kind.function

    def emit_wait(self, operator: Any, issued: Proxy) -> Proxy:
        """Append the node that waits for a call that another node issued."""
        node = issued.node
        hint = node.name.replace("issue_", "wait_", 1)
        plain = TracedValue(node, issued.tracer)  # a plain value does not wait when it is used
        result = self._tracer.create_proxy("call_function", operator, (plain,), {}, name=hint)
        result.node.meta["call"] = node.meta["call"]
        return result

    def _result(self, result: Proxy, call: tuple[Any, ...], contract: Contract | None) -> Proxy:
        if contract is None:
            return result
        if contract.batched_by is not None and not contract.batched_by.startswith("."):
            _meet_batched_form(contract.batched_by)
        if contract.gradient is None:
            return value_of(result, contract.structure)
        to, _, args, kwargs, timeout = call
        tracked = (result, to, contract.gradient, args, kwargs, timeout, self._tracked)
        self._tracked += 1
        taken = self._contract_of_gradient(contract.gradient)
        tracker = self._tracer.create_proxy("call_function", ops.track_gradient, tracked, {})
        if taken is not None:
            tracker.node.meta["contract"] = taken
        return value_of(tracker, contract.structure)

    def _contract_of_gradient(self, name: str) -> Contract | None:
        try:
            return None if name.startswith(".") else contract_of(functions.resolve(name))
        except ContractError as error:
            raise _refused("the gradient of a remote result cannot be pushed", error) from error

    def emit(
        self,
        operator: Any,
        args: tuple[Any, ...],
        name: str,
        contract: Contract | None,
        kwargs: dict[str, Any] | None = None,
    ) -> Proxy:
        """Append the node that makes or begins a call.

        Raises:
            CaptureError: the user's own `except` clause guards the call, or the call may write and is made by a
                `finally` or an `__exit__`.
        """
        if place := guarding_handler(sys._getframe(1), self._tracer.end):
            raise capture_error(
                "an except clause guards a remote call, and a graph cannot catch",
                where=place,
                hint="Handle errors around the whole forward, or keep this part whole with leaf_modules= or wrap=.",
            )
        reads = operator is ops.fetch or (contract is not None and contract.is_read)
        if not reads and (place := clean_up(sys._getframe(1), self._tracer.end)):
            raise capture_error(
                "a finally or an __exit__ makes a remote call, which a graph leaves out after an error",
                where=place,
                hint="Make the call outside of the forward, or keep this part whole with leaf_modules= or wrap=.",
            )
        proxy = self._tracer.create_proxy("call_function", operator, args, kwargs or {}, name=name)
        proxy.node.meta["call"] = proxy.node.name
        if contract is not None:
            proxy.node.meta["contract"] = contract
        return proxy

    def _destination(self, to: Any) -> Any:
        if isinstance(to, rpc.WorkerInfo):
            return to.name
        if isinstance(to, Proxy):
            return _named(to.node) or to
        if isinstance(to, int) and not isinstance(to, bool) and rpc.api._is_current_rpc_agent_set():
            with suspended():
                return rpc.get_worker_info(to).name
        return self._value(to)

    def values(self, values: Any, *, by_client: bool = False) -> Any:
        """Return the arguments of a call in the form in which a graph can hold them.

        Args:
            values: the arguments.
            by_client: whether a registered client gets the arguments.
        """
        function = functools.partial(self._value, by_client=by_client)
        return _mapped(values, function, self._watcher.opened)

    def in_flight(self, values: Iterable[Any]) -> None:
        """Note arguments that a client may read until it is waited for; of containers, a graph gives it copies."""
        for each in values:
            self._watcher.sent(each)

    def _value(self, value: Any, *, by_client: bool = False) -> Any:
        if isinstance(value, str) and "Proxy(" in value:
            raise capture_error(
                f"the text {value!r} was made from a traced value, whose run-time value is not in it",
                hint="Send the value itself, or make the text before the capture.",
            )
        if type(value) in _IMMEDIATE or isinstance(value, _PLAIN):
            return value
        if inspect.isroutine(value) or isinstance(value, type):
            return self._function_value(value)
        if isinstance(value, torch.nn.Module):
            self._watcher.sent(value, by_client=False)
            return value
        if hasattr(value, "__fx_create_arg__"):
            return value
        self._watcher.sent(value, by_client=by_client)
        return self._tracer.constant(value, type(value).__name__)

    def _function_value(self, function: Any) -> Proxy:
        try:
            name = functions.register(function)
        except ContractError as error:
            raise _refused("cannot send this function", error) from error
        if name not in self._sent:
            hint = name.rpartition(":")[2].rpartition(".")[2]
            self._sent[name] = self._tracer.create_proxy("call_function", functions.resolve, (name,), {}, name=hint)
        return self._sent[name]


def _meet_batched_form(name: str) -> None:
    try:
        functions.meet(name)
    except ContractError as error:
        raise _refused("the batched form of a remote function cannot be called", error) from error


_IMMEDIATE = frozenset({str, int, float, bool, complex, type(None), type(...), range})
"""Classes whose values become part of generated code; a value of a subclass is kept as it is."""
_PLAIN = (
    *(Proxy, torch.Tensor, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(torch.SymInt, torch.SymFloat, torch.SymBool, rpc.PyRRef, rpc.WorkerInfo),
)


def _mapped(value: Any, function: Callable[[Any], Any], opened: Callable[[Any], None]) -> Any:
    """Apply a function to the parts of a value.

    A graph would turn a container of a subclass into a plain one. Such a container is therefore one part as a whole,
    provided that it holds no value of the graph.

    Raises:
        CaptureError: a container of a subclass holds values of the graph.
    """
    kind = type(value)
    inner = functools.partial(_mapped, function=function, opened=opened)
    if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        opened(value)
        if isinstance(value, dict):
            return {key: inner(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*(inner(each) for each in (value.start, value.stop, value.step)))
        parts = [inner(each) for each in value]
        return parts if isinstance(value, list) else kind(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, (list, tuple, dict)) and not isinstance(value, torch.Size):
        held = value.values() if isinstance(value, dict) else value
        if any(isinstance(each, VALUES) for each in pytree.tree_leaves(list(held))):
            raise capture_error(
                f"the forward sends a {kind.__name__} with tensors, of which a graph would make a plain "
                f"{'dict' if isinstance(value, dict) else 'list' if isinstance(value, list) else 'tuple'}",
                hint="Send a plain one, or its parts.",
            )
    return function(value)


def _refused(what: str, error: ContractError) -> CaptureError:
    return capture_error(f"{what}: {str(error).removesuffix(f' {error.hint}')}", hint=error.hint)


def _named(node: Node) -> str | None:
    """Return the worker that a destination surely is: that of `get_worker_info("ps0")`, or a created value's owner."""
    if node.target is rpc.get_worker_info and node.args and isinstance(node.args[0], str):
        return node.args[0]
    if node.op != "call_method" or node.target not in ("owner", "owner_name"):
        return None
    made = node.args[0]
    is_made = isinstance(made, Node) and made.target is ops.create and isinstance(made.args[0], str)
    return made.args[0] if is_made else None  # type: ignore[union-attr, return-value]


def _sequence(args: Any) -> tuple[Any, ...]:
    if args is None:
        return ()
    if isinstance(args, (tuple, list)) or (isinstance(args, StructuredValue) and args.is_sequence):
        return tuple(args)
    raise capture_error(
        f"the arguments of a remote call are a {type(args).__name__}, whose length only a run knows",
        hint="Write args=(first, second, ...).",
    )


def _seconds(timeout: Any) -> Any:
    if timeout is None or isinstance(timeout, Proxy):
        return timeout
    return None if timeout == rpc.constants.UNSET_RPC_TIMEOUT else float(timeout)


def _unfold(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Replace partials and bound methods by the function that they call; it is sent instead and does the same."""
    while isinstance(function, functools.partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        return function.__func__, (function.__self__, *args), kwargs
    if getattr(function, "__fx_already_patched", False):  # replaced by torch.fx.wrap during the trace
        return function.__wrapped__, args, kwargs
    if isinstance(function, Proxy) or not callable(function):
        raise capture_error(
            "the remote function is not known before the model runs",
            hint="Name it in the program.",
        )
    return function, args, kwargs


def _is_remote_forward(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a `RemoteModule` calls its forward and does nothing else, as it would for a CUDA device."""
    generated = getattr(function, "__name__", "") == "_remote_forward"
    return generated and len(args) >= 3 and torch.device(args[1]).type != "cuda"
