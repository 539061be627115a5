"""Number values over all GraphModules of a module tree: nodes of two graphs that compute the same share a number."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import rpc
from torch.fx import Node

from fxlib.runtime import kind_of
from fxlib.runtime.ops import remote_call, track_gradient
from fxlib.runtime.ops.calls import completes
from fxlib.runtime.ops.registry import TRACKERS, is_item, item_of
from fxlib.runtime.submodules import graph_modules
from fxlib.wire.callables import known_name


class Numbers:
    """Numbers of expressions. Two nodes have the same number if the same steps from the same sources lead to both.

    A source is an argument or an attribute of the module, by its path, or a constant. An issued call with its wait
    counts as the blocking call, and the time at which a gradient leaves does not count. Effects are ignored: two random
    draws have the same number.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, module: nn.Module) -> dict[Node, int]:
        """Return the number of each node of each graph in a module tree."""
        found: dict[Node, int] = {}
        for path, body in graph_modules(module):
            for node in body.graph.nodes:
                found[node] = self.constant(self._key(node, path, found))
        return found

    def constant(self, value: object) -> int:
        """Return the number of a constant."""
        return self._numbers.setdefault(value, len(self._numbers))

    def value(self, value: object, numbers: dict[Node, int]) -> int:
        """Return the number of an argument: a constant, a node, or a structure of both."""
        return self.constant(self._frozen(value, numbers))

    def _key(self, node: Node, path: str, numbers: dict[Node, int]) -> object:
        if node.op in {"placeholder", "get_attr"}:
            return node.op, f"{path}.{node.target}"
        if node.target is rpc.get_worker_info and node.args and isinstance(node.args[0], str):
            return self._frozen(node.args[0], numbers)  # a server, by its name
        target: object = f"{path}.{node.target}" if node.op == "call_module" else callable_key(node.target)
        made: Node = node
        if node.target in TRACKERS:
            target = callable_key(track_gradient)
        if completes(node) and isinstance(issue := node.args[0], Node) and (kind := kind_of(node)) is not None:
            if is_item(node):
                item, (to, _, timeout, _) = item_of(node), issue.args
                call = to, item.function, item.args, item.kwargs, timeout
                return node.op, callable_key(remote_call), self._frozen(call, numbers), self._frozen({}, numbers)
            target, made = callable_key(kind.blocking), issue
        return node.op, target, self._frozen(made.args, numbers), self._frozen(made.kwargs, numbers)

    def _frozen(self, value: Any, numbers: dict[Node, int]) -> object:
        if isinstance(value, Node):
            return "node", numbers[value]
        if isinstance(value, (tuple, list)):
            return "items", tuple(self._frozen(each, numbers) for each in value)
        if isinstance(value, dict):
            return "dict", tuple((self._frozen(key, numbers), self._frozen(value[key], numbers)) for key in value)
        if isinstance(value, slice):
            return "slice", tuple(self._frozen(each, numbers) for each in (value.start, value.stop, value.step))
        return type(value).__name__, repr(value)


def callable_key(target: Any) -> object:
    """Return a key that identifies a callable: its name on the wire's lists, or else the callable itself."""
    return target if isinstance(target, str) else known_name(target) or id(target)
