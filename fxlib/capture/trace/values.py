"""Stand-ins that a traced program holds in place of tensors, remote results, futures and RRef call helpers."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch.fx import Node, Proxy
from torch.fx.proxy import Attribute, TracerBase
from typing_extensions import override

from fxlib.capture.handled_errors import capture_error
from fxlib.capture.trace import value_facts
from fxlib.capture.trace.value_facts import ANSWERED
from fxlib.errors import CaptureError
from fxlib.runtime.ops.collectives import wait_collective
from fxlib.spec.contract import Exactly

Structure = Mapping[Any, Any] | Sequence[Any]


def value_of(proxy: Proxy, structure: object) -> Any:
    """Return the proxy with the declared structure; a leaf stays a plain proxy unless its value is declared as well."""
    if isinstance(structure, (tuple, list, Mapping)):
        return StructuredValue(proxy.node, proxy.tracer, structure)
    if isinstance(structure, (bool, str, Exactly)):
        value = structure.value if isinstance(structure, Exactly) else structure
        tracer: Any = proxy.tracer
        tracer.check_plain(proxy, value)
        return value
    return proxy


class _Mutating:
    """Operators that write to their left side; torch.fx would replace them by ones that do not, or refuse them."""

    node: Node
    tracer: TracerBase

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
IN_PLACE = frozenset(getattr(operator, f"i{name}") for name in ARITHMETIC)


def _define_in_place(name: str) -> None:
    target, plain = getattr(operator, f"i{name}"), getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def write(self: Any, other: Any) -> Any:
        # Numbers cannot be written to: the old value may still be used under another name.
        chosen = plain if is_number(self.node) else target
        return self.tracer.create_proxy("call_function", chosen, (self, other), {})

    setattr(_Mutating, f"__i{name}__", write)


for _name in ARITHMETIC:
    _define_in_place(_name)


def is_number(node: Node) -> bool:
    """Return whether the node's value is surely a number: a size, or a value computed from sizes alone."""
    if node.op == "placeholder":
        return node.type in (int, float, bool, "int", "float", "bool")
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "item", "ndimension", "nelement", "stride")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "itemsize", "nbytes")
    inputs = node.all_input_nodes
    own = getattr(node.target, "__module__", None) in ("_operator", "math", "builtins")
    return own and bool(inputs) and all(is_number(value) for value in inputs)


_VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag", "data", "grad"})
"""Attributes of a tensor that are tensors; reading one is an operation like any other."""


_CHANGES = frozenset({"_version", "grad_fn", "is_leaf", "output_nr", "requires_grad", "_base", "shape", "ndim"})
"""Attributes of a tensor that in-place operations change; they are read where the program reads them."""


class _Asked(_Mutating):
    """A stand-in that answers what the program asks of a value, and refuses to be changed."""

    tracer: Any
    _fields: ClassVar[frozenset[str]]
    """The attributes of the stand-in itself."""

    def _attribute(self, name: str) -> TracedAttribute:
        found = TracedAttribute(cast("Proxy", self), name)
        if name in _VIEWS or name in _CHANGES:
            found.node  # noqa: B018 - makes the node at this point: what follows may write in place, or be a use
        return found

    def _answer(self) -> type:
        return self._class() if value_facts.asked_by_the_program(sys._getframe(1)) else type(self)

    __class__ = property(_answer)  # isinstance reads this
    _is_param = False  # and this next, for disguised Parameters

    def _class(self) -> type:
        found: type = self.tracer.class_of(self)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._fields:
            raise _undecidable(f"the forward assigns .{name} of a tensor", "Use an operation that makes a new tensor.")
        object.__setattr__(self, name, value)


class TracedValue(_Asked, Proxy):
    """A value of the program, like torch.fx's Proxy, whose in-place operators stay in place."""

    _fields = frozenset({"node", "tracer", "structure", "_wait", "_result"})

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERED and (known := self.tracer.metadata_of(self, name)) is not None:
            return known
        return self._attribute(name)

    def __len__(self) -> int:
        found: int = self.tracer.refuse(self, "the length of a traced value is asked for, and only a run knows it")
        return found


class TracedAttribute(_Asked, Attribute):
    """An attribute of a traced value: `x.T`, `x.data`."""

    _fields = frozenset({"root", "attr", "tracer", "_node", "_behind"})

    def __init__(self, root: Proxy, attr: str) -> None:
        super().__init__(root, attr)
        self._behind: Node = next(reversed(self.tracer.graph.nodes))

    @property
    def node(self) -> Node:  # type: ignore[override]
        """Its node, which is made once it is needed, but where the program reads it: a method may change an object."""
        if self._node is None:
            with self.tracer.graph.inserting_after(max(self._behind, self.root.node)):
                self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __getattr__(self, name: str) -> TracedAttribute:
        return self._attribute(name)


class StructuredValue(TracedValue):
    """A remote result whose contract declares its structure: it can be unpacked, indexed and iterated."""

    def __init__(self, node: Node, tracer: TracerBase, structure: Structure) -> None:
        super().__init__(node, tracer)
        self.structure = structure
        self._checked_behind = -1

    _fields = TracedValue._fields | {"_checked_behind"}

    @override
    def _class(self) -> type:
        checked = self._checked_behind >= 0  # a list stays a list, however it is changed
        return type(self.structure if checked else self._relied_on())

    def _relied_on(self) -> Structure:
        """Return the structure for a decision by it; each run then checks it, again behind code that may change it."""
        self._refuse_if_changed()
        if self._checked_behind != self.tracer.handed_over:
            self._checked_behind = self.tracer.handed_over
            self.tracer.check_structure(self)
        return self.structure

    def _refuse_if_changed(self) -> None:
        if self.tracer.is_restructured(self):
            raise capture_error(
                "the forward asks for the elements of a remote result behind an operation that adds, removes or "
                "exchanges some of them, and only a run knows them then",
                hint="Change a list or dict of your own: list(rows), dict(features).",
            )

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a tuple or a list, and not a dict."""
        return not isinstance(self.structure, Mapping)

    def __len__(self) -> int:
        return len(self._relied_on())

    def __iter__(self) -> Iterator[Any]:
        structure = self._relied_on()
        for each in structure if isinstance(structure, Mapping) else range(len(structure)):
            self._refuse_if_changed()
            yield each if isinstance(structure, Mapping) else self[each]
        self._refuse_if_changed()

    def __contains__(self, key: object) -> bool:
        if isinstance(self.structure, Mapping) and not isinstance(key, Proxy):
            return key in self._relied_on()
        raise _undecidable("`in` compares elements, which only a run knows")

    def __getitem__(self, key: Any) -> Proxy:
        item: Proxy = self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})
        if self.tracer.is_restructured(self):
            return item
        try:
            if (declared := self.structure[key]) is None:
                self.tracer.note_leaf(item, self)
            return value_of(item, declared)
        except (KeyError, IndexError, TypeError) as error:
            raise capture_error(
                f"the declared structure {self.structure!r} has no element {key!r}",
                hint="Correct returns= in the remote function's contract.",
            ) from error

    def __delitem__(self, key: object) -> NoReturn:
        raise _undecidable("the forward deletes an element of a remote result", "Leave it out of a copy.")

    def get(self, key: Any, *default: Any) -> Any:
        """Return the value of a declared key, or else the default."""
        mapping: Mapping[Any, Any] = self._mapping("get", asked=False)
        if isinstance(key, Proxy) or self.tracer.is_restructured(self):
            return self._attribute("get")(key, *default)
        return self[key] if key in mapping else (*default, None)[0]

    def keys(self) -> Any:
        """Return the declared keys."""
        return _Keys(self._mapping("keys"))

    def values(self) -> ValuesView[Proxy]:
        """Return the values, in the declared order."""
        return _Values(self._mapping("values"))

    def items(self) -> ItemsView[Any, Proxy]:
        """Return keys and values, in the declared order."""
        return _Items(self._mapping("items"))

    def _mapping(self, method: str, *, asked: bool = True) -> Mapping[Any, Any]:
        if isinstance(self.structure, Mapping):
            if asked:
                self._relied_on()
            return cast("Mapping[Any, Any]", self)
        raise AttributeError(f"{type(self.structure).__name__!r} object has no attribute {method!r}")


class _View:
    """A view of a dict's entries, which takes each entry when it is asked for it, and may be walked backwards."""

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))  # type: ignore[call-overload]


class _Keys(_View, KeysView[Any]):
    pass


class _Values(_View, ValuesView[Proxy]):
    pass


class _Items(_View, ItemsView[Any, Proxy]):
    pass


class FutureValue(TracedValue):
    """The future of a call that the program issued itself."""

    def __init__(self, node: Node, tracer: TracerBase, wait: Callable[[Proxy], Any]) -> None:
        super().__init__(node, tracer)
        self._wait = wait
        self._result: list[Any] = []

    @override
    def _class(self) -> type:
        return torch.futures.Future

    def wait(self) -> Any:
        """Wait for the call, and return its value; later waits return the same one."""
        if not self._result:
            self._result.append(self._wait(self))
        return self._result[0]

    def value(self) -> Any:
        """Return the value of a future that has been waited for."""
        if self._result:
            return self._result[0]
        raise _undecidable("value() of a future that was not waited for depends on timing", "Call wait().")

    def done(self) -> NoReturn:
        """Refuse the question, because its answer depends on timing."""
        raise _undecidable("done() depends on timing", "Call wait().")

    def then(self, *_: object) -> NoReturn:
        """Refuse a callback: no graph can express when it runs, and on which thread."""
        raise _undecidable("a future's callback runs outside of the graph", "wait() for it, then compute.")

    add_done_callback = set_result = set_exception = then


class CollectiveValue(TracedValue):
    """The result of a collective that was issued; each use of it waits for it first."""

    _fields = TracedValue._fields | {"_waited"}

    def __init__(self, issued: Proxy) -> None:
        super().__init__(issued.node, issued.tracer)
        self._waited: Proxy | None = None

    @override
    def _class(self) -> type:
        return torch.Tensor

    def wait(self) -> Proxy:
        """Wait for the collective, and return its value; later waits return the same one."""
        if self._waited is None:
            self._waited = self.tracer.calls.emit_wait(wait_collective, self)
        return self._waited


class CollectedFutures:
    """The future of futures that `torch.futures.collect_all` returns."""

    def __init__(self, futures: list[Any]) -> None:
        self._futures = futures

    def wait(self) -> list[Any]:
        """Wait for all, in order, and return the futures."""
        for future in self._futures:
            future.wait()
        return self._futures

    value = wait

    def then(self, *_: object) -> NoReturn:
        """Refuse a callback, as for one future."""
        raise _undecidable("a future's callback runs outside of the graph", "wait() for it, then compute.")

    add_done_callback = done = then


class RRefCalls:
    """The helper from `rref.rpc_sync()`, `rref.rpc_async()` or `rref.remote()`: any attribute is a remote method."""

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(method, args, kwargs)


def _undecidable(problem: str, hint: str = "Decide it before the capture, or on the server.") -> CaptureError:
    return capture_error(problem, hint=hint)
