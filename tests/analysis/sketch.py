"""Programs in a few lines, and their schedules as lists of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Rewrite
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import create, fetch, issue_call, remote_call, wait
from fxlib.runtime.ops.collectives import collective
from fxlib.spec.contract import Contract

READ = Contract(reads=frozenset({"table"}))
WRITE = Contract(writes=frozenset({"table"}))


class Sketch:
    """A program under construction; every node is named, and tests speak of names. Inputs called "ids" are integers."""

    def __init__(self, *inputs: str, root: nn.Module | None = None) -> None:
        self.graph, self.root = Graph(), root or nn.Module()
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        for node in self.inputs:
            if node.name == "ids":
                node.meta["requires_grad"] = False

    def work(self, name: str, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        """Local work: a function, or a method by name."""
        op = "call_method" if isinstance(target, str) else "call_function"
        return self.graph.create_node(op, target, args, kwargs, name=name)

    def module(self, name: str, target: str, *args: Any) -> Node:
        return self.graph.create_node("call_module", target, args, {}, name=name)

    def state(self, name: str) -> Node:
        return self.graph.get_attr(name)

    def call(self, name: str, *args: Any, to: Any = "ps0", contract: Contract | None = READ) -> Node:
        return self._remote(name, remote_call, args, to, contract)

    def issue(self, name: str, *args: Any, to: Any = "ps0", contract: Contract | None = READ) -> Node:
        return self._remote(name, issue_call, args, to, contract)

    def create(self, name: str, *args: Any, to: Any = "ps0", contract: Contract | None = READ) -> Node:
        return self._remote(name, create, args, to, contract)

    def fetch(self, name: str, rref: Node) -> Node:
        return self.graph.create_node("call_function", fetch, (rref, None), name=name)

    def wait(self, name: str, issue: Node) -> Node:
        return self.graph.create_node("call_function", wait, (issue,), name=name)

    def collective(self, name: str, value: Node, group: str = "0") -> Node:
        """A collective in its blocking form."""
        return self.graph.create_node("call_function", collective, ("all_reduce", (value, "sum", group)), name=name)

    def returns(self, *values: Node) -> CapturedModule:
        self.graph.output(values)
        return CapturedModule(self.root, self.graph)

    def _remote(self, name: str, target: Any, args: tuple[Any, ...], to: Any, contract: Contract | None) -> Node:
        arguments: tuple[Any, ...] = (to, f"shop:{name}", args, {}, None)
        node = self.graph.create_node("call_function", target, arguments, name=name)
        if contract is not None:
            node.meta["contract"] = contract
        return node


def names(module: nn.Module) -> list[str]:
    """The nodes of a module, by name, in order; inputs, state and output left out."""
    skipped = {"placeholder", "get_attr", "output"}
    return [node.name for node in module.graph.nodes if node.op not in skipped]  # type: ignore[union-attr]


def schedule(module: CapturedModule) -> list[str]:
    """The nodes of the module's schedule. A call is `x`, and where it is split `x_issue` and `x`."""
    return names(recipes.apply(module).module)


def reason(rewrite: Rewrite, name: str) -> Reason:
    """Why a call is where it is."""
    return next(call.reason for call in rewrite.calls if call.node == name)
