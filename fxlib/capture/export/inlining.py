"""From the graph of an exported program to one as tracing makes it: blocks inlined, and what fxlib notes on nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxlib.capture.export.calls import ExportRecorder
from fxlib.capture.export.nodes import Replay, describe, place_of
from fxlib.errors import CaptureError
from fxlib.runtime.guards.export_guards import InputGuards

_BLOCKS: Any = torch.ops.higher_order


def inlined(module: GraphModule, recorder: ExportRecorder, guards: InputGuards) -> Graph:
    """Return a copy of a graph in which blocks of a grad mode and of autocast are nodes that enter and leave them.

    Args:
        module: of an exported program, its placeholders those of the leaves of the arguments.
        recorder: of the remote calls that the program makes.
        guards: of the leaves.

    Raises:
        CaptureError: it holds another operator with a body of its own (`torch.cond`, `while_loop`).
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
    """Copy the nodes of `module`, whose placeholders may be `known`; return what its output returns."""
    target: Any
    for node in module.graph.nodes:
        target = node.target
        if node in known:
            continue
        if node.op == "output":
            return map_arg(node.args[0], known.__getitem__)
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), GraphModule):
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
        where=place_of(node),
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
