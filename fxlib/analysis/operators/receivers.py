"""Whether the object whose method a node calls is a tensor, or may be one of the user's own.

A graph names methods, and not the classes they belong to: `add` may be a tensor's, or that of a meter which is handed
to the forward. A pure method of a tensor is called for its result; so a call whose result nobody takes speaks of
another object, and may do anything. What asks for nothing but a size is left out: no object answers that by acting.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.access import operator_of
from fxlib.analysis.operators.leaf_modules import attribute
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.ops.registry import TRACKERS

_PYTHON = frozenset({"_operator", "builtins"})


class Receivers:
    """Answers for the nodes of one graph; each is looked at once, however many methods are called one after another."""

    def __init__(self, module: GraphModule) -> None:
        """Take attributes and submodules from `module`."""
        self._module = module
        self._tensors: dict[Node, bool] = {}

    def calls_object(self, node: Node) -> bool:
        """Whether the node calls a method of what may be an object of the user's own."""
        if node.op != "call_method" or node.target in words.QUERIES:
            return False
        return not self._is_tensor(node.args[0] if node.args else None)

    def reads_object(self, node: Node) -> bool:
        """Whether the node reads an attribute of such an object, other than those that every tensor has."""
        if node.target not in (getattr, read_attribute) or node.args[1] in words.PLAIN_ATTRIBUTES:
            return False
        return not self._is_tensor(node.args[0])

    def _is_tensor(self, value: object) -> bool:
        """Whether the value comes of torch's own work; methods and Python's operators are as good as their argument."""
        path: list[Node] = []
        found: bool | None = False
        while isinstance(value, Node):
            found = self._tensors[value] if value in self._tensors else self._by_itself(value)
            path.append(value)
            if found is not None:
                break
            value = value.args[0] if value.args else None
        self._tensors.update(dict.fromkeys(path, bool(found)))
        return bool(found)

    def _by_itself(self, value: Node) -> bool | None:
        """Return whether a value is a tensor; None where its first argument tells."""
        if value.op == "get_attr":
            return isinstance(attribute(self._module, str(value.target)), torch.Tensor)
        if value.op == "call_module":
            return type(self._module.get_submodule(str(value.target))).__module__.startswith("torch.nn.")
        if value.op == "placeholder" or (value.target not in TRACKERS and operator_of(value) is None):
            return False
        plain = value.op == "call_function" and getattr(value.target, "__module__", None) not in _PYTHON
        return True if plain else None
