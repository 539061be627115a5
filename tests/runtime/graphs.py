"""Graphs in a few lines: each node gets its place in the program as it is added."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, Node

from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import issue_batch, issue_call, remote_call, wait, wait_item
from fxlib.runtime.ops.batches import NamedCall
from tests.runtime import remote_functions

FUNCTIONS = remote_functions.NAME


class Program:
    """A captured program under construction; `order` sets a node apart from its place in the code."""

    def __init__(self, *inputs: str) -> None:
        self.graph = Graph()
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        for place, node in enumerate(self.inputs):
            node.meta["order"] = place

    def local(self, function: Any, *args: Any, order: int | None = None) -> Node:
        return self._placed(self.graph.call_function(function, args), order)

    def call(self, to: Any, name: str, *args: Any, timeout: float | None = None, order: int | None = None) -> Node:
        return self._remote(remote_call, (to, name, args, timeout), order)

    def issue(self, to: Any, name: str, *args: Any, timeout: float | None = None, order: int | None = None) -> Node:
        return self._remote(issue_call, (to, name, args, timeout), order)

    def batch(self, to: Any, *calls: NamedCall, orders: tuple[int, ...] = ()) -> tuple[Node, tuple[Node, ...]]:
        """Issue calls as one; return the batch, and a wait for each, called "call_0" and so on."""
        batch = self._placed(self.graph.call_function(issue_batch, (to, calls, None, None)), max(orders, default=None))
        waits = []
        for index in range(len(calls)):
            item = self.graph.call_function(wait_item, (batch, index))
            item.meta["call"] = f"call_{index}"
            waits.append(self._placed(item, orders[index] if orders else None))
        return batch, tuple(waits)

    def wait(self, issue: Node) -> Node:
        return self._placed(self.graph.call_function(wait, (issue,)), issue.meta["order"])

    def returns(self, value: Any, root: nn.Module | None = None, original: nn.Module | None = None) -> CapturedModule:
        self.graph.output(value).meta["order"] = len(self.graph.nodes)
        return CapturedModule(root or nn.Module(), self.graph, original=original)

    def _remote(self, target: Any, call: tuple[Any, str, Any, float | None], order: int | None) -> Node:
        to, name, args, timeout = call
        function = name if name.startswith(".") else f"{FUNCTIONS}:{name}"
        node = self.graph.call_function(target, (to, function, args, {}, timeout))
        node.meta["call"] = node.name
        return self._placed(node, order)

    def _placed(self, node: Node, order: int | None) -> Node:
        node.meta["order"] = len(self.graph.nodes) - 1 if order is None else order
        return node
