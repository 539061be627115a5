"""Decisions of an exported forward by the values of its arguments: made as for the samples, and kept as conditions.

Only the truth of a tensor is answered, and only if it is a function of sizes, constants, and arguments that hold
integers or flags, such as masks. Decisions by floats differ from step to step, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxlib.capture import source
from fxlib.runtime.guards.value_conditions import MAX_STEPS, Reference, Step, ValueCondition, operator_name

_IMMEDIATE = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class ValueChecks:
    """The decisions by values in one export.

    Args:
        samples: the leaves of the arguments, with their values.
    """

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples
        self._leaves: dict[Node, int] = {}
        self.conditions: list[ValueCondition] = []

    def begin(self, args: Any, kwargs: Any) -> None:
        """Record which of the exporter's nodes stand for the leaves of the arguments."""
        for index, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor) and (node := _node_of(leaf)) is not None:
                self._leaves.setdefault(node, index)

    def answer(self, tensor: torch.Tensor) -> bool | None:
        """Return whether a tensor is true for the samples, or None if no condition on arguments can tell."""
        node = _node_of(tensor)
        if node is None or tensor.numel() != 1 or (steps := self._steps(node)) is None:
            return None
        asked = [self._samples[index] for index in _referred(steps) if index < len(self._samples)]
        if any(each.is_floating_point() or each.is_complex() for each in asked):
            return None  # floats differ from step to step
        with _disable_current_modes():  # the samples are not stand-ins
            answer = ValueCondition(steps=steps, answer=True).ask(self._samples)
        found = ValueCondition(steps=steps, answer=answer, source=source.here())
        if asked and found not in self.conditions:
            self.conditions.append(found)
        return found.answer

    @staticmethod
    def constants_behind(asked: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors from before the export that are part of some value or that it is computed from."""
        nodes = set()
        for each in pytree.tree_leaves(asked):
            if type(each) in (torch.Tensor, torch.nn.Parameter):  # the exporter's stand-ins have classes of their own
                yield each
            elif isinstance(each, torch.Tensor) and (node := _node_of(each)) is not None:
                nodes.add(node)
        for node in _ancestors(nodes, ()):
            if node.op == "get_attr":
                yield getattr(node.graph.owning_module or _tracer().root, str(node.target))

    def _steps(self, asked: Node) -> tuple[Step, ...] | None:
        needed = _ancestors([asked], self._leaves)
        if not needed.isdisjoint(_written(asked.graph, self._leaves)):
            return None
        positions = dict(self._leaves)
        steps: list[Step] = []
        for node in asked.graph.nodes:
            if node not in needed or node in positions:
                continue
            if (step := _step(node, positions)) is None or len(steps) == MAX_STEPS:
                return None
            positions[node] = len(self._samples) + len(steps)
            steps.append(step)
        return tuple(steps)


def _node_of(tensor: torch.Tensor) -> Node | None:
    if (mode := get_proxy_mode()) is None:
        return None
    tracked: Any = mode.tracer.tensor_tracker.get(tensor)
    return None if tracked is None else tracked.proxy.node


def _tracer() -> Any:
    mode: Any = get_proxy_mode()
    return mode.tracer


def _ancestors(nodes: Iterable[Node], known: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    leaves, waiting = set(known), list(nodes)
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += [] if node in leaves else node.all_input_nodes
    return found


def _written(graph: Graph, leaves: Iterable[Node]) -> set[Node]:
    """Return the nodes written to so far, and all nodes that they are made from, which may share their memory."""
    targets = [
        argument
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for argument in node.all_input_nodes
    ]
    return _ancestors(targets, leaves)


def _step(node: Node, positions: dict[Node, int]) -> Step | None:
    name = operator_name(node.target) if node.op == "call_function" else None
    if name is None:
        return None
    try:
        args = tuple(_argument(each, positions) for each in node.args)
        kwargs = tuple((key, _argument(value, positions)) for key, value in node.kwargs.items())
    except LookupError:
        return None
    return Step(operator=name, args=args, kwargs=kwargs)


def _referred(steps: Iterable[Step]) -> set[int]:
    values = [each for step in steps for each in (*step.args, *(value for _, value in step.kwargs))]
    return {each.index for each in pytree.tree_leaves(values) if isinstance(each, Reference)}


def _argument(value: Any, positions: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return Reference(positions[value])
    if isinstance(value, (tuple, list)):
        return tuple(_argument(each, positions) for each in value)
    if type(value) in _IMMEDIATE:
        return value
    raise LookupError(value)
