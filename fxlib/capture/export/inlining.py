"""Translate the graph of an exported program to one like that of a trace.

Blocks are inlined, the exporter's operators become the recorded calls again, and nodes get the metadata of a trace.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxlib.capture import intercept
from fxlib.capture.export.calls import NUMBERS, OPERATOR, TENSOR, TOKENS, ExportRecorder
from fxlib.capture.export.sizes import expression
from fxlib.errors import CaptureError
from fxlib.runtime.guards.export_guards import Expression, InputGuards, TensorGuard
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.tracking import result_structure
from fxlib.spec.contract import Contract, Exactly

_BLOCKS: Any = torch.ops.higher_order


def inlined(module: GraphModule, recorder: ExportRecorder, guards: InputGuards) -> Graph:
    """Return a copy of a graph in which nodes enter and leave the blocks of a grad mode and of autocast.

    Args:
        module: the module of an exported program, with one placeholder for each leaf of the arguments.
        recorder: the recorder of the remote calls that the program makes.
        guards: the guards on the leaves.

    Raises:
        CaptureError: the graph holds another operator with a body of its own (`torch.cond`, `while_loop`).
    """
    graph = Graph()
    replay = Replay(graph, recorder, guards)
    output = _copy(replay, module, {}, grad_enabled=torch.is_grad_enabled())
    graph.output(output)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return graph


def _copy(replay: Replay, module: GraphModule, known: dict[Node, Any], *, grad_enabled: bool) -> Any:
    """Copy the nodes of `module`, whose placeholders may be `known`, and return the value of its output."""
    target: Any
    for node in module.graph.nodes:
        target = node.target
        if node in known:
            continue
        if node.op == "output":
            return map_arg(node.args[0], known.__getitem__)
        if target is torch._C._set_grad_enabled and node.args[0] is grad_enabled:  # no change, which traces leave out
            known[node] = None
        elif node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), GraphModule):
            known[node] = getattr(module, str(node.target))
        elif isinstance(target, torch._ops.HigherOrderOperator):
            known[node] = _inline(replay, node, known, grad_enabled=grad_enabled)
        elif target is operator.getitem and isinstance(values := known[node.args[0]], (tuple, list)):
            known[node] = values[node.args[1]]
        elif target is torch.ops.aten.item.default and known[node.args[0]] in replay.numbers:
            known[node] = known[node.args[0]]
        elif replay.handles(node):
            known[node] = replay.results(node, known)
        else:
            known[node] = _copied(replay.graph, node, known)
            replay.note(known[node])
            grad_enabled = bool(node.args[0]) if target is torch._C._set_grad_enabled else grad_enabled
    raise AssertionError("a graph ends with its output")


def _inline(replay: Replay, node: Node, known: dict[Node, Any], *, grad_enabled: bool) -> Any:
    args: Any = node.args
    graph = replay.graph
    called: Any = node.target
    if called is _BLOCKS.wrap_with_set_grad_enabled:
        enabled, body, *inputs = args
        _mode(graph, torch._C._set_grad_enabled, (enabled,), node)
        result = _body(replay, known[body], inputs, known, grad_enabled=bool(enabled))
        _mode(graph, torch._C._set_grad_enabled, (grad_enabled,), node)
        return result
    if called is _BLOCKS.wrap_with_autocast:
        device, dtype, enabled, cache_enabled, body, *inputs = args
        mode = (device, dtype, enabled, cache_enabled)
        entered = _mode(graph, torch.amp.autocast_mode._enter_autocast, mode, node)
        result = _body(replay, known[body], inputs, known, grad_enabled=grad_enabled)
        _mode(graph, torch.amp.autocast_mode._exit_autocast, (entered,), node)
        return result
    raise CaptureError(
        f"the forward calls {called.name()}, which has a body of its own",
        where=_source_of(node),
        hint="Write it as plain code, or keep it out of the forward.",
    )


def _body(replay: Replay, body: GraphModule, inputs: list[Any], known: dict[Node, Any], *, grad_enabled: bool) -> Any:
    names = [node for node in body.graph.nodes if node.op == "placeholder"]
    values = [map_arg(value, known.__getitem__) for value in inputs]
    return _copy(replay, body, dict(zip(names, values, strict=True)), grad_enabled=grad_enabled)


def _mode(graph: Graph, function: Any, args: tuple[Any, ...], block: Node) -> Node:
    node = graph.call_function(function, args)
    describe(node, block)
    return node


def _copied(graph: Graph, node: Node, known: dict[Node, Any]) -> Node:
    copied = graph.node_copy(node, known.__getitem__)
    copied.meta.clear()
    describe(copied, node)
    return copied


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OWN_FRAME = f'\n  File "{intercept.__file__}"'
"""The start of the stack-trace line at which a function that was replaced during the export leaves the user's code."""
_KEPT = ("stack_trace", "nn_module_stack", "tensor_meta")
_ARITHMETIC = {"add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod}


class Replay:
    """Inserts the recorded calls of one export into the graph that is made from it."""

    def __init__(self, graph: Graph, recorder: ExportRecorder, guards: InputGuards) -> None:
        self.graph = graph
        self._recorder = recorder
        self._leaves = iter(guards.leaves)
        self.numbers: set[Node] = set()
        """The nodes of results that are numbers in a run and tensors in the export."""
        self._plain: dict[Node, Node] = {}
        self._sizes: dict[Expression, Any] = {}
        """The nodes that compute sizes; for a size of an input that was not needed yet, (placeholder, dimension)."""

    def handles(self, node: Node) -> bool:
        """Return whether the node is the exporter's operator for a recorded call."""
        return node.target is OPERATOR

    def note(self, node: Node) -> None:
        """Take sizes from a placeholder, which stands for the next leaf of the arguments."""
        guard = next(self._leaves) if node.op == "placeholder" else None
        for dim, size in enumerate(guard.sizes if isinstance(guard, TensorGuard) else ()):
            if isinstance(size, str):
                self._sizes.setdefault(size, (node, dim))

    def results(self, node: Node, known: Mapping[Node, Any]) -> list[Node]:
        """Append the recorded call and the checks of its result, and return the tensors in the result."""
        site, tensors, sizes = cast(tuple[Any, Any, Any], node.args)
        recorded = self._recorder.sites[site]
        given = map_arg([*tensors, *sizes], known.__getitem__)
        slots = dict(zip(self._recorder.slots[recorded], given, strict=True))
        args, kwargs = map_arg(
            (recorded.args, dict(recorded.kwargs)), lambda each: slots[each] if each in slots else self._copied(each)
        )
        made = self.graph.create_node(recorded.op, recorded.target, args, kwargs, recorded.name)
        made.meta.update({key: recorded.meta[key] for key in ("call", "contract") if key in recorded.meta})
        spec = self._recorder.specs[recorded]
        if isinstance(contract := made.meta.get("contract"), Contract) and callable(contract.returns):
            structure = None if spec.is_leaf() else pytree.tree_unflatten([None] * spec.num_leaves, spec)
            made.meta["contract"] = replace(contract, returns=structure)
        found = [made]
        if recorded.target not in TOKENS and recorded.target not in TRACKERS:
            found = self._unpacked(made, recorded, node.meta["val"])
        while made.op != "root":  # the call and the nodes appended after it
            describe(made, node)
            made = made.next
        return found

    def _copied(self, recorded: Node) -> Node:
        """Return the node that reads an attribute or looks up a function, as recorded."""
        if recorded not in self._plain:
            self._plain[recorded] = self.graph.node_copy(recorded)
        return self._plain[recorded]

    def _unpacked(self, made: Node, recorded: Node, stand_ins: Sequence[torch.Tensor]) -> list[Node]:
        """Split a result into its parts; each run checks that it is as declared, since the program relied on that."""
        function = self._recorder.calls.called(recorded)
        remaining, gaps = iter(stand_ins), iter(self._recorder.gaps[recorded])
        declares = recorded.op != "call_module"  # a module is local, and was itself asked for its result
        found: list[Node] = []

        def visit(value: Node, part: pytree.TreeSpec) -> None:
            if part.is_leaf():
                gap = next(gaps)
                kind = next((kind for kind, mark in NUMBERS.items() if mark is gap), None)
                if gap is TENSOR:
                    like = next(remaining)
                    if declares:
                        self._check_tensor(value, function, like)
                    found.append(value)
                elif kind is not None:
                    next(remaining)
                    self.graph.call_function(result_structure.check_plain, (value, function, kind.__name__))
                    found.append(value)
                    self.numbers.add(value)
                elif isinstance(gap, (bool, str, Exactly)):
                    exact = gap.value if isinstance(gap, Exactly) else gap
                    self.graph.call_function(result_structure.check_plain, (value, function, (exact,)))
                return
            is_mapping = part.type in (dict, OrderedDict)
            keys = tuple(part.context) if is_mapping else tuple(range(part.num_children))
            declared = keys if is_mapping else len(keys)
            if declares:
                self.graph.call_function(result_structure.check_structure, (value, function, declared))
            for key, child in zip(keys, part.children(), strict=True):
                visit(self.graph.call_function(operator.getitem, (value, key)), child)

        visit(made, self._recorder.specs[recorded])
        return found

    def _check_tensor(self, value: Node, function: str, like: torch.Tensor) -> None:
        sizes = tuple(self._size(expression(getattr(size, "node", size))) for size in like.shape)
        self.graph.call_function(result_structure.check_tensor, (value, function, like.dtype, sizes))

    def _size(self, size: Expression) -> Any:
        """Return a size as a number or as the node that computes it, or None if only a run knows the size."""
        if isinstance(size, int):
            return size
        if size not in self._sizes and (isinstance(size, str) or size[0] not in _ARITHMETIC):
            return None
        held = self._sizes.get(size)
        if isinstance(held, tuple):
            held = self._sizes[size] = self.graph.call_function(torch.ops.aten.sym_size.int, held)
        elif held is None:
            parts = [self._size(part) for part in size[1:]]
            if any(part is None for part in parts):
                return None
            held = parts[0]
            for part in parts[1:]:
                held = self.graph.call_function(_ARITHMETIC[size[0]], (held, part))
            self._sizes[size] = held
        return held


def describe(node: Node, origin: Node) -> None:
    """Annotate a node with its origin in the user's program, which export has noted on `origin`."""
    node.meta.update({key: origin.meta[key] for key in _KEPT if key in origin.meta})
    if trace := node.meta.get("stack_trace"):
        node.meta["stack_trace"] = trace.partition(_OWN_FRAME)[0]
    if place := _source_of(origin):
        node.meta["source"] = place


def _source_of(node: Node) -> str:
    """Return file:line of the user's innermost statement that made a node, or "" if there is none."""
    frames = _FRAME.findall((node.meta.get("stack_trace") or "").partition(_OWN_FRAME)[0])
    return "{}:{}".format(*frames[-1]) if frames else ""
