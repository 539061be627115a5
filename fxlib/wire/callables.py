"""Labels of what stays with the client: a callable has the same label in every walk through a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec

from fxlib.runtime.data_parallel import body_of
from fxlib.runtime.ops.calls import ClientFunction
from fxlib.wire.opaque import OpaqueFunction, tuple_label
from fxlib.wire.targets import function_name, operator_name, registered

_UNFIT = re.compile(r"[^\w.:<>#$@ \[\]-]")


def bodies(root: nn.Module) -> Iterator[GraphModule]:
    """Yield each GraphModule in a module tree once, parents first, including those that capture made of its parts."""
    for module in root.modules():
        found = body_of(module) if isinstance(module, DistributedDataParallel) else module
        if isinstance(found, GraphModule) and (found is module or found is not module._modules["module"]):
            yield found


def specs_of(body: GraphModule) -> Iterator[TreeSpec]:
    """Yield the structures of a graph's arguments and results, if it has them."""
    info = getattr(body.graph._codegen, "pytree_info", None)
    yield from (spec for spec in (info.in_spec, info.out_spec) if spec is not None) if info is not None else ()


def label_of(owner: object) -> str:
    """Return "package.module.Name" of a function or class, or of the class of any other object."""
    named = owner if isinstance(getattr(owner, "__qualname__", None), str) else type(owner)
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    return _UNFIT.sub("_", f"{module}.{name}")[:400]


def known_name(target: Any) -> tuple[str, str] | None:
    """Return the kind of wire target and the name of a callable on one of the allow-lists, or None."""
    if (name := function_name(target)) is not None:
        return "function", name
    if hasattr(target, "_qualified_op_name") or hasattr(target, "overloadpacket"):
        name = operator_name(target)
        return None if name is None else ("operator", name)
    return None


class Labels:
    """Labels of the callables on no allow-list, in the order in which the graphs of a module tree use them."""

    def __init__(self, root: nn.Module) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.methods: set[str] = set()
        self._of: dict[int, str] = {}
        self._registered = {id(function): label for label, function in registered().items()}
        for body in bodies(root):
            for node in body.graph.nodes:
                if node.op == "call_method":
                    self.methods.add(str(node.target))
                elif node.op == "call_function" and id(node.target) not in self._of:
                    self._add(node.target)

    def label(self, function: object) -> str:
        """Return the label of a callable that a graph of the tree calls."""
        return self._of[id(function)]

    def _add(self, function: Any) -> None:
        if known_name(function) is not None:
            return
        if isinstance(function, OpaqueFunction):
            label = f".{function.slot}" if function.method else function.slot
        elif isinstance(function, ClientFunction):
            label = function.label
        elif (label := self._registered.get(id(function), "")) == "":
            label = base = label_of(function)
            count = 1
            while label in self.functions:
                count += 1
                label = f"{base}#{count}"
        self._of[id(function)] = label
        self.functions[label] = function


def tuple_classes(root: nn.Module) -> dict[str, type]:
    """Return the named tuple classes among the arguments in a module tree's graphs, and in nested ones, by label."""
    found = [cls for body in bodies(root) for spec in specs_of(body) for cls in _packed(spec)]
    found += [cls for body in bodies(root) for node in body.graph.nodes for cls in _nested((node.args, node.kwargs))]
    return {tuple_label(cls): cls for cls in reversed(found)}


def _packed(spec: TreeSpec) -> Iterator[type]:
    if hasattr(spec.context, "_fields"):
        yield spec.context
    for child in spec.children():
        yield from _packed(child)


def _nested(value: object) -> Iterator[type]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_fields"):
            yield type(value)
        for item in value:
            if not isinstance(item, Node):
                yield from _nested(item)
