"""Record remote calls in an export: first as operators, and afterwards as the nodes that tracing makes.

`torch.export` follows tensors only. Each call is therefore recorded as a node of a separate graph, as in a trace, and
the exporter sees one operator, `fxlib_export::call`, which takes the tensors among the arguments and returns what the
contract's `returns` makes of them. In the exported graph, the recorded node then takes the operator's place.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import has_side_effect, map_arg
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.rrefs import RRefPaths
from fxlib.capture.trace.remote import METHOD_ARGUMENTS, RemoteCalls
from fxlib.capture.trace.values import FutureValue, RRefCalls
from fxlib.runtime import is_wait, ops
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.submodules import local_modules
from fxlib.spec.contract import Contract, Exactly
from fxlib.utils.pytree import python_number

_LIBRARY = torch.library.Library("fxlib_export", "DEF")
_LIBRARY.define("call(int site, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
OPERATOR: Any = torch.ops.fxlib_export.call.default
has_side_effect(OPERATOR)  # a call is made even if its result is not used
_PLAIN = (int, float, bool, str, type(None), Exactly)
_SYMBOLS = (torch.SymFloat, torch.SymBool)
RREFS = (ops.create, ops.make_rref)
TOKENS = (ops.start_call, ops.issue_call, *RREFS)
RECORDED = (ops.remote_call, ops.fetch, ops.wait, *TOKENS, *TRACKERS)
"""Operators whose calls the exporter sees as calls of `fxlib_export::call`."""
TENSOR = object()
NUMBERS: dict[type, Any] = {int: object(), float: object()}
"""Placeholders for the numbers in a result, which the exporter sees as tensors without dimensions."""
_DTYPES = {int: torch.int64, float: torch.float64}
_thread = threading.local()


class ExportRecorder(Tracer):
    """Records the remote calls of one export; `calls` has to be set before the export begins."""

    calls: RemoteCalls

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root, self.graph = root, Graph()
        self.end: Any = None
        self.sites: list[Node] = []
        """The recorded node of each operator call."""
        self.specs: dict[Node, pytree.TreeSpec] = {}
        """The structure of each node's result."""
        self.slots: dict[Node, list[Node]] = {}
        """Stand-ins in a node's arguments for the operator's arguments, tensors first."""
        self.constants: dict[str, Any] = {}
        """The objects that are kept beside the graph, by name."""
        self.gaps: dict[Node, list[Any]] = {}
        """The leaves of each node's result, with `TENSOR` in place of each tensor."""
        self._given: dict[Node, Any] = {}
        self._makers: dict[Node, Node] = {}
        self._results: dict[Node, Any] = {}
        self.rref_paths = RRefPaths(root)
        self._plain: dict[object, Proxy] = {}
        self.has_checkpoints = False
        """Whether the forward has checkpointed a part of itself."""

    def checkpoint_began(self, _: object) -> None:
        """Note that the forward checkpoints a part of itself."""
        self.has_checkpoints = True

    def forget(self) -> None:
        """Drop all references to the objects of one export, since values kept by the forward may still lead here."""
        self.__dict__.clear()

    # These methods serve the recorder of remote calls.

    def rref(self, value: Any) -> Proxy:
        """Return the node that reads a live RRef, by the path under which the model holds it."""
        if (path := self.rref_paths.path_of(value)) is None:
            return self.constant(value, self.rref_paths.hint_of(value))
        return self._attribute(path)

    def constant(self, value: object, hint: str) -> Proxy:
        """Return the node that reads an object kept beside the graph, since it is not an attribute of the model."""
        for name, known in self.constants.items():
            if known is value:
                return self._attribute(name)
        names = (f"{hint}_{count}" if count else hint for count in itertools.count())
        name = next(each for each in names if each not in self.constants and not hasattr(self.root, each))
        self.constants[name] = value
        return self._attribute(name)

    def _attribute(self, path: str) -> Proxy:
        if path not in self._plain:
            self._plain[path] = self.create_proxy("get_attr", path, (), {})
        return self._plain[path]

    @override
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy) and a.node.op == "call_function" and a.node.target in RECORDED:
            token = self.result(a.node)
            slot = self._slot(token)
            self._makers[slot] = a.node
            return slot
        if isinstance(a, (torch.Tensor, torch.SymInt)):
            return self._slot(a)
        if isinstance(a, _SYMBOLS):
            raise capture_error("a remote call is given a number that only a run knows", hint="Send a tensor.")
        if isinstance(a, rpc.PyRRef):
            return self.rref(a).node
        if isinstance(a, rpc.WorkerInfo):
            return self._lookup(a).node
        if isinstance(a, Undeclared):
            a.refuse()
        if (number := python_number(a)) is not None:
            return number
        return super().create_arg(a)

    def _lookup(self, worker: rpc.WorkerInfo) -> Proxy:
        if worker.name not in self._plain:
            self._plain[worker.name] = self.create_proxy("call_function", rpc.get_worker_info, (worker.name,), {})
        return self._plain[worker.name]

    def _slot(self, value: Any) -> Node:
        slot = self.graph.placeholder(f"given_{len(self._given)}")
        self._given[slot] = value
        return slot

    # These methods make the values that the program gets.

    def value(self, made: Any) -> Any:
        """Return the value that the program gets in place of a recorded one."""
        if isinstance(made, FutureValue):
            self.result(made.node)
            return ExportedFuture(self, made)
        if isinstance(made, Proxy):
            found = self.result(made.node)
            return ExportedRRef(self, made) if made.node.target in RREFS else found
        return made

    def parallel(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a `DistributedDataParallel` as one node, and return stand-ins for its result."""
        path = next(path for path, each in local_modules(self.root) if each is module)
        return self.result(self.create_node("call_module", path, self.create_arg(args), self.create_arg(kwargs)))

    def result(self, node: Node) -> Any:
        """Return stand-ins for a node's result; the operator is called when the result is first requested."""
        if node not in self._results:
            given = [each for each in node.all_input_nodes if each in self._given]
            tensors = [each for each in given if isinstance(self._given[each], torch.Tensor)]
            sizes = [each for each in given if each not in tensors]
            self.slots[node] = [*tensors, *sizes]
            self.sites.append(node)
            site = len(self.sites) - 1
            found = OPERATOR(site, [self._given[each] for each in tensors], [self._given[each] for each in sizes])
            self._results[node] = pytree.tree_unflatten(self._with_gaps(node, found), self.specs[node])
        return self._results[node]

    def _with_gaps(self, node: Node, tensors: list[torch.Tensor]) -> list[Any]:
        """Put the leaves of a result that are not tensors back among its tensors."""
        remaining = iter(tensors)

        def part(gap: Any) -> Any:
            if gap is TENSOR:
                return next(remaining)
            if gap in NUMBERS.values():
                return next(remaining).item()
            return gap.value if isinstance(gap, Exactly) else gap

        return [part(gap) for gap in self.gaps[node]]

    def stand_ins(self, site: int, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
        """Return tensors like those of the result, for the exporter."""
        node = self.sites[site]
        given = dict(zip(self.slots[node], [*tensors, *sizes], strict=True))
        found = self._like_the_result(node, given)
        leaves, self.specs[node] = pytree.tree_flatten(found)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, Undeclared)) and type(leaf) not in _PLAIN:
                raise capture_error(
                    f"the contract of {self.calls.called(node) or node.name} declares a {type(leaf).__name__}",
                    hint="returns= makes tensors, numbers, flags, strings, None, and nests of them.",
                )
        self.gaps[node] = [
            TENSOR if isinstance(leaf, torch.Tensor) else NUMBERS.get(type(leaf), leaf) for leaf in leaves
        ]
        found = [torch.empty((), dtype=_DTYPES[type(leaf)]) if type(leaf) in _DTYPES else leaf for leaf in leaves]
        # Each is a tensor of its own, as in a result: a contract may return one tensor twice, or an argument.
        return [torch.empty_like(leaf) for leaf in found if isinstance(leaf, torch.Tensor)]

    def _like_the_result(self, node: Node, given: Mapping[Node, Any]) -> Any:
        args: Any = node.args
        if node.op == "call_module":
            return self._like_the_result_inside(node, {**self._given, **given})
        if node.target in TOKENS:
            return torch.empty(0)
        if node.target in TRACKERS:
            return torch.empty_like(given[args[0]])
        call = (
            self._makers[args[0]] if is_wait(node) or (node.target is ops.fetch and args[0] in self._makers) else node
        )
        contract: Contract | None = call.meta.get("contract")
        function = str(call.args[1]) if len(call.args) > 1 else call.name
        if contract is None or contract.returns is None:
            return Undeclared(function)
        if not callable(contract.returns):
            return pytree.tree_map(lambda _: Undeclared(function), contract.returns, is_leaf=lambda each: each is None)
        known = {**self._given, **given}
        sent: Any = map_arg(tuple(call.args[2:4]), known.get)
        positional, named = sent
        return _made(contract.returns, function, positional[call.meta.get(METHOD_ARGUMENTS, 0) :], named)

    def _like_the_result_inside(self, node: Node, known: Mapping[Node, Any]) -> Any:
        """Return the result of the module inside a `DistributedDataParallel`, run on tensors without values."""
        inside = self.root.get_submodule(f"{node.target}.module")
        held = (*inside.named_parameters(), *inside.named_buffers())
        state = {name: torch.empty(tuple(each.shape), dtype=each.dtype) for name, each in held}
        sent: Any = map_arg((node.args, dict(node.kwargs)), known.get)
        with torch.no_grad():
            return torch.func.functional_call(inside, state, *sent)


@contextmanager
def recording(recorder: ExportRecorder) -> Iterator[None]:
    """Connect the exporter's operator with this recorder, in this thread."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        del _thread.recorder


@torch.library.register_fake("fxlib_export::call", lib=_LIBRARY)
def _(site: int, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
    return _thread.recorder.stand_ins(site, tensors, sizes)


def _made(returns: Callable[..., Any], function: str, args: Any, kwargs: Any) -> Any:
    try:
        return returns(*args, **kwargs)
    except Exception as error:
        raise capture_error(
            f"returns= of the contract of {function} fails: {type(error).__name__}: {error}",
            hint="It is called with the arguments of the call, tensors without values among them.",
        ) from error


class Recorder(Protocol):
    """The part of the export's recorder that these values use."""

    calls: RemoteCalls

    def value(self, made: Any) -> Any:
        """Return the value that the program gets in place of a recorded one."""


class Undeclared:
    """A remote result whose contract declares no structure: the program may ignore it but must not use it."""

    def __init__(self, function: str) -> None:
        self._function, self._called = function, source.here()

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Refuse any use of the result."""
        self._refuse("uses", where="")

    def refuse_returned(self) -> NoReturn:
        """Refuse a forward that returns the result."""
        self._refuse("returns", where=self._called)

    def _refuse(self, what: str, *, where: str) -> NoReturn:
        raise capture_error(
            f"the forward {what} the result of {self._function}, of which no contract says what it is",
            where=where,
            hint="Declare it with returns=, a function of the same arguments that makes tensors like the result: "
            "@fxlib.remote(returns=lambda table, rows: torch.empty(*rows.shape, 8)).",
        )

    __getattr__ = __iter__ = __len__ = __getitem__ = __bool__ = __call__ = refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __matmul__ = __truediv__ = refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse an operation of torch on the result."""
        found = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        found.refuse()


class ExportedFuture:
    """The future of a call that the program issued itself."""

    def __init__(self, recorder: Recorder, made: FutureValue) -> None:
        self._recorder, self._made = recorder, made

    def wait(self) -> Any:
        """Wait for the call, and return its value; later waits return the same one."""
        return self._recorder.value(self._made.wait())

    def value(self) -> Any:
        """Return the value of a future that has been waited for."""
        return self._recorder.value(self._made.value())

    def done(self) -> NoReturn:
        """Refuse the question, because its answer depends on timing."""
        self._made.done()

    def then(self, *_: object) -> NoReturn:
        """Refuse a callback: no graph can express when it runs, and on which thread."""
        self._made.then()

    add_done_callback = set_result = set_exception = then


class ExportedRRef:
    """The RRef that `rpc.remote` returns to a program under export."""

    def __init__(self, recorder: Recorder, made: Proxy) -> None:
        self._recorder, self._made = recorder, made

    def to_here(self, timeout: Any = None) -> Any:
        """Fetch the value from its owner."""
        return self._recorder.value(self._recorder.calls.fetch(self._made, timeout))

    def rpc_sync(self, timeout: Any = None) -> RRefCalls:
        """Return the helper whose method calls block."""
        return self._methods("sync", timeout)

    def rpc_async(self, timeout: Any = None) -> RRefCalls:
        """Return the helper whose method calls return futures."""
        return self._methods("async", timeout)

    def remote(self, timeout: Any = None) -> RRefCalls:
        """Return the helper whose method calls leave their results on the server."""
        return self._methods("remote", timeout)

    def _methods(self, style: Any, timeout: Any) -> RRefCalls:
        return self._recorder.calls.method_calls(style, self._made, timeout, then=self._recorder.value)

    def __fx_create_arg__(self, tracer: Tracer) -> Any:
        """Return this RRef's node, for the arguments of another call."""
        return tracer.create_arg(self._made)
