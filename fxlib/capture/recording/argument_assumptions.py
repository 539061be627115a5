"""Record what a capture assumes about the forward's arguments: their classes, and that they are not other objects."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import Attribute

from fxlib.capture.handled_errors import capture_error
from fxlib.capture.recording.observers import is_a
from fxlib.capture.recording.record import Record
from fxlib.errors import CaptureError
from fxlib.runtime.guards.capture_facts import ArgumentFact

_WRITING_METHODS = frozenset(
    {
        "update",
        "pop",
        "popitem",
        "clear",
        "append",
        "extend",
        "insert",
        "remove",
        "setdefault",
        "add",
        "discard",
        "sort",
    }
    | {"reverse", "appendleft", "extendleft", "popleft", "rotate", "__setitem__", "__delitem__", "__setattr__"}
)
_TELLS = frozenset({operator.is_, operator.is_not, id, type, isinstance, hasattr, getattr, callable})
"""Functions whose results depend on which values are one object, or on their classes."""
_Path = tuple[str, tuple[tuple[str, Any], ...], Node | None]
"""The argument (empty: the model), the steps from there to a part of it, and the argument's node in a trace."""


class ArgumentAssumptions:
    """Collects the assumptions about arguments on which answers about traced values depend."""

    def __init__(self, model: object, record: Record) -> None:
        self._model, self._record = model, record
        self._asked: list[tuple[_Path, str, Any, _Path | None]] = []

    def identity(self, one: Any, other: Any) -> None:
        """Handle a comparison by identity: a traced value is identical only to itself, as each run has to confirm."""
        if one is other:
            return
        if self._record.stand_ins is not None:
            self._record.stand_ins.compared(one, other)
        elif isinstance(one, Proxy) and isinstance(other, Proxy):
            self._distinct(one, other)
        elif isinstance(one, Proxy) or isinstance(other, Proxy):
            proxy, value = (one, other) if isinstance(one, Proxy) else (other, one)
            if (path := _path_of(proxy)) is not None:
                self._asked.append((path, "is not", value, None))
            else:
                self.class_of(proxy)  # refuses a value whose class only a run knows

    def _distinct(self, one: Proxy, other: Proxy) -> None:
        paths = _path_of(one), _path_of(other)
        if paths[0] is None or paths[1] is None:
            raise capture_error(
                "two traced values are compared by identity, and only a run knows whether they are one",
                hint="Move the decision out of the forward.",
            )
        self._asked.append((paths[0], "is not", None, paths[1]))

    def class_of(self, proxy: Proxy, *, exact: bool = False) -> type:
        """Return the class that a traced value certainly has, and note what this assumes about arguments.

        Raises:
            CaptureError: only a run knows the class.
        """
        if self._record.tracer is None:
            raise AssertionError("nothing is traced")
        asked: type = self._record.tracer.class_of_value(proxy)
        if exact and (path := _path_of(proxy)) is not None:
            self._asked.append((path, "type is", asked, None))
        return asked

    def attribute(self, name: str, value: Any) -> None:
        """Handle the read of an attribute of one of the graph's values."""
        if isinstance(value, torch.Tensor):
            if name == "__class__":
                self._record.class_asked(value)
                if self._record.stand_ins is not None:
                    self._record.stand_ins.asked_for_class(value)
            elif not hasattr(torch.Tensor, name):
                self._tag(name, value)
            elif self._record.stand_ins is not None:
                self._record.method_of_tensors(name)
        elif name == "__class__" and is_a(value, Proxy):
            self.class_of(value, exact=True)

    def _tag(self, name: str, tensor: torch.Tensor) -> None:
        """Handle the read of an attribute that somebody may have given a tensor."""
        stand_ins = self._record.stand_ins
        if stand_ins is not None and (argument := stand_ins.argument(tensor)):
            self._asked.append(((argument, (), None), "lacks", name, None))
        else:
            self._record.attribute_asked(tensor, name)

    def asked_for_id(self, value: Any) -> None:
        """Refuse to give a tensor's id, except for the model's own tensors: each run checks which are tied."""
        if is_a(value, Proxy) and value.node.op != "get_attr":
            raise id_asked()
        if is_a(value, torch.Tensor) and self._record.stand_ins is not None:
            self._record.stand_ins.asked_for_id(value)

    def looked_up(self, key: Any, container: Any) -> None:
        """Handle the search for a tensor in a container, which compares the tensor by identity."""
        if is_a(key, (Proxy, torch.Tensor)) and is_a(container, (dict, set, frozenset, list, tuple, type({}.keys()))):
            for each in container:
                if is_a(each, (Proxy, torch.Tensor)):
                    self.identity(key, each)

    def rely_on_class(self, node: Node, kind: type) -> None:
        """Note that an argument is assumed to be an instance of a class."""
        self._asked.append(((str(node.target).lstrip("*"), (), node), "isinstance", kind, None))

    def of_traced(self, function: Any, proxy: Proxy, operands: tuple[Any, ...]) -> Any:
        """Return the function to call on a traced value, giving a run's answer if its stand-in's would differ."""
        if function is type:
            kind = self.class_of(proxy, exact=True)
            return lambda _: kind
        if function is hasattr and operands:
            has = self._has(proxy, operands[0])
            return lambda *_: has
        if function is callable:
            has = _defines(self.class_of(proxy, exact=True), "__call__")
            return lambda _: has
        if function is getattr and len(operands) > 1 and not self._has(proxy, operands[0]):
            return lambda *_: operands[1]
        if function is isinstance and operands and _path_of(proxy) is not None:
            # The answer for a subclass or a parameter may differ from that for a tensor.
            self.class_of(proxy, exact=operands[0] is not torch.Tensor)
        return function

    def handed_on(self, function: Any, others: Sequence[Any]) -> None:
        """Refuse to pass a function to one in C if it tells objects or their classes apart, as only a run can.

        Raises:
            CaptureError: the graph's values may be among the other operands.
        """
        held: tuple[Any, ...] = ()
        while is_a(function, functools.partial):
            held, function = (*function.args, *function.keywords.values(), *held), function.func
        if (
            is_a(function, BuiltinFunctionType | type)
            and function in _TELLS
            and any(map(_may_hold_values, (*held, *others)))
        ):
            raise capture_error(
                f"the forward hands {function.__name__} to a function that is written in C, and what it is asked there "
                "about tensors is not seen",
                hint="Call it in the forward, as in [type(each) for each in values].",
            )

    def dispatched(self, value: Any) -> type:
        """Return the class of the value by which a `functools.singledispatch` function chooses, as in a run."""
        if is_a(value, Proxy):
            return self.class_of(value, exact=True)
        kind: type = self.type_of_stand_in(value)(value)
        return kind

    def type_of_stand_in(self, value: Any) -> Any:
        """Return a function that returns a value's class: for an exporter's stand-in, that of the tensor in a run."""
        if self._record.stand_ins is None or not is_a(value, torch.Tensor):
            return type
        self._record.class_asked(value)
        kind = self._record.stand_ins.class_of(value)
        return lambda _: kind

    def _has(self, proxy: Proxy, name: str) -> bool:
        """Return whether a traced value's class has an attribute; if not, note that the value itself must lack it."""
        has = _defines(self.class_of(proxy), name)
        if not has and (path := _path_of(proxy)) is not None:
            self._asked.append((path, "lacks", name, None))
        return has

    def decided_by(self, place: _Path, value: Any) -> None:
        """Note that the program branched on a size of an argument, or of a tensor of the model."""
        self._asked.append((place, "equals", value, None))

    def facts(self, graph: Graph) -> Iterator[ArgumentFact]:
        """Yield the facts that each run has to find about its arguments.

        Raises:
            CaptureError: the program branches on an argument that it also writes to.
        """
        stand_ins = self._record.stand_ins
        for (argument, steps), kind in () if stand_ins is None else stand_ins.asked_classes.items():
            self._asked.append(((argument, steps, None), "type is", kind, None))
        written = {node.args[0] for node in graph.nodes if _writes(node)}
        _refuse_written_defaults(graph, written)
        facts = {}
        for path, test, value, other in self._asked:
            for each in filter(None, (path, other)):
                if each[2] in written:
                    raise capture_error(
                        f"the argument {each[0]} is written to, and a part of it decides which way the program goes",
                        hint="Decide by a value that the forward does not change.",
                    )
            key = (path[:2], test, id(value), None if other is None else other[:2])
            fact = ArgumentFact(
                name=path[0], steps=path[1], test=test, value=value, other=None if other is None else other[:2]
            )
            if not fact.name and (broken := fact.broken({"": self._model})):
                raise capture_error(
                    broken, hint="Decide it before the capture, and keep it as an attribute of the model."
                )
            facts[key] = fact
        yield from facts.values()


def _refuse_written_defaults(graph: Graph, written: Iterable[Any]) -> None:
    """Refuse a graph that writes to the default of an argument: the graph has its own default, besides the forward's.

    Raises:
        CaptureError: the graph does so.
    """
    kept = {node for node in graph.nodes if node.op == "placeholder" and any(map(_is_mutable, node.args))}
    for node in written:
        base = node
        while isinstance(base, Node) and base.op != "placeholder":
            base = base.args[0] if base.args else None
        if base in kept:
            raise capture_error(
                f"the forward writes to the default of its argument {base}, so one step would depend on the last",
                hint="Take None as the default, and make a new one in the forward.",
            )


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, (list, dict, set))


def _may_hold_values(operand: Any) -> bool:
    """Return whether an operand may hold one of the graph's values: in a container, or yielded by an iterator."""
    if is_a(operand, (list, tuple, set, frozenset)):
        return any(map(_may_hold_values, operand))
    if is_a(operand, dict):
        return any(map(_may_hold_values, (*operand, *operand.values())))
    return is_a(operand, (Proxy, torch.Tensor)) or hasattr(type(operand), "__next__")


def id_asked() -> CaptureError:
    """Return the error of a forward that asks for the id of a tensor that only a run makes."""
    return capture_error(
        "the forward asks for the id of a traced value, and only a run knows which tensors are one",
        hint="Move the decision out of the forward.",
    )


def _defines(kind: type, name: str) -> bool:
    return any(name in base.__dict__ for base in kind.__mro__)


def _path_of(proxy: Proxy) -> _Path | None:
    """Return the path to an argument, a part of one, or state of the model, or None for a computed value."""
    if isinstance(proxy, Attribute):
        found = _path_of(proxy.root)
        return None if found is None else (found[0], (*found[1], ("getattr", proxy.attr)), found[2])
    return path_of_node(proxy.node)


def path_of_node(node: Node) -> _Path | None:
    """Return the path to an argument, a part of one, or state of the model, or None if a node computes the value."""
    if node.op == "placeholder":
        return str(node.target).lstrip("*"), (), node
    if node.op == "get_attr":
        return "", tuple(("getattr", part) for part in str(node.target).split(".")), node
    step = {getattr: "getattr", operator.getitem: "getitem"}.get(node.target)  # type: ignore[arg-type]
    step = "get" if node.op == "call_method" and node.target == "get" and not node.kwargs else step
    if step is None or len(node.all_input_nodes) != 1 or not isinstance(node.args[0], Node):
        return None
    found = path_of_node(node.args[0])
    key: Any = node.args[1:] if step == "get" else node.args[1]
    return None if found is None else (found[0], (*found[1], (step, key)), found[2])


def _writes(node: Node) -> bool:
    """Return whether a node changes the contents of a container or an object."""
    return node.target is operator.setitem or (node.op == "call_method" and node.target in _WRITING_METHODS)
