"""Whether the object whose method a node calls is a tensor, or may be one of the user's own.

A graph names methods, and not the classes they belong to: `add` may be a tensor's, or that of a meter which is handed
to the forward. A pure method of a tensor is called for its result; so a call whose result nobody takes speaks of
another object, and may do anything. What asks for nothing but a size is left out: no object answers that by acting.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis import vocabulary as words
from fxlib.analysis.modules import attribute
from fxlib.analysis.operators import operator_of
from fxlib.runtime import ops

_PYTHON = frozenset({"_operator", "builtins"})


def calls_an_object(module: GraphModule, node: Node) -> bool:
    """Whether the node calls a method of what may be an object of the user's own."""
    if node.op != "call_method" or node.target in words.QUERIES:
        return False
    return not _is_tensor(module, node.args[0] if node.args else None)


def _is_tensor(module: GraphModule, value: object) -> bool:
    """Whether the value comes of torch's own work; methods and Python's operators are as good as their argument."""
    while isinstance(value, Node):
        if value.op == "get_attr":
            return isinstance(attribute(module, str(value.target)), torch.Tensor)
        if value.op == "call_module":
            return type(module.get_submodule(str(value.target))).__module__.startswith("torch.nn.")
        if value.op == "placeholder" or (value.target is not ops.track_gradient and operator_of(value) is None):
            return False
        if value.op == "call_function" and getattr(value.target, "__module__", None) not in _PYTHON:
            return True
        value = value.args[0] if value.args else None
    return False
