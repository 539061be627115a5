"""The operator that a node calls, by one name for all ways of writing it.

`x.relu()`, `torch.relu(x)`, `F.relu(x)`, `nn.ReLU()(x)` and `aten.relu(x)` are called relu; what writes into its first
argument has an underscore behind its name, `relu_`. Overloads, and what an operator is given, make no difference. An
operator of fxlib's own has its label, and one of another library its namespace before its name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from fxlib.runtime.ops.registry import OPERATORS, Role
from fxlib.runtime.submodules import submodule
from fxlib.wire.callables import known_name

_PUBLISHED = {"truediv": "div", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_"}
"""Python's arithmetic, by what torch calls it where it works on tensors."""
_OF_TORCH = frozenset({"aten", "prims"})


def called(node: Node, module: GraphModule) -> str:
    """Return the name of what a node calls; "" if it calls nothing, a graph, or code that is on no list."""
    if node.op == "call_method":
        return _plain(str(node.target))
    if node.op == "call_module":
        return called_module(submodule(module, str(node.target)))
    return name_of(node.target) if node.op == "call_function" else ""


def called_module(module: nn.Module) -> str:
    """Return the name of a module of torch's own; "" for any other one, a graph among them."""
    own = not isinstance(module, GraphModule) and type(module).__module__.startswith("torch.nn.")
    return _plain(type(module).__name__) if own else ""


def called_in(module: GraphModule) -> frozenset[str]:
    """Return the names of all that the nodes of one graph call."""
    return frozenset(called(node, module) for node in module.graph.nodes) - {""}


def name_of(target: object) -> str:
    """Return the name of a function, or of a method by its name; "" if it is on no list."""
    if isinstance(target, str):
        return _plain(target)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _of_operator(target)
    known = known_name(target)
    if known is None:
        return ""
    kind, name = known
    if kind == "function" and name.startswith("fxlib."):
        return name
    module, _, last = name.rpartition(".")
    return _plain(last.rstrip("_") if module.endswith("operator") and last[:2] != "__" else last)


def names_of(*targets: object) -> frozenset[str]:
    """Return the names of functions, and of methods by their names."""
    return frozenset(map(name_of, targets))


def labels_of(roles: Iterable[Role]) -> frozenset[str]:
    """Return the names of those operators of fxlib's own that have one of these roles."""
    wanted = frozenset(roles)
    return frozenset(each.label for each in OPERATORS if each.role in wanted)


@functools.cache
def _of_operator(target: OpOverload[..., object] | OpOverloadPacket[..., object]) -> str:
    known = known_name(target)
    if known is None:
        return ""
    space, _, name = known[1].partition("::")
    name = _plain(name.partition(".")[0])
    return name if space in _OF_TORCH else f"{space}::{name}"


@functools.cache
def _plain(name: str) -> str:
    if name[:2] == "__":
        name = name.strip("_")
    name = _PUBLISHED.get(name, name)
    within = "_" if name.endswith("_") else ""
    return name.lower().replace("_", "") + within
