"""Find the launcher's own objects in a graph, and what the graph does with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.client.value_numbering import Numbers, callable_key
from fxlib.runtime import is_call, is_issue, is_wait
from fxlib.runtime.ops.calls import client_of, completes
from fxlib.runtime.ops.registry import CALLS_BY_NAME, FETCHES, TRACKERS, is_batch, items_of
from fxlib.runtime.submodules import graph_modules
from fxlib.spec.contract import Contract
from fxlib.wire.callables import known_name
from fxlib.wire.encode import fits

CALLS = CALLS_BY_NAME | TRACKERS
_THROUGH = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Sequential, GraphModule)
"""Modules that return their argument, or call a method of it, whatever its type."""
_LAYOUTS = frozenset({"clone", "contiguous"})
IsOwn = Callable[[Node, GraphModule], bool]


def held_uses(module: nn.Module, numbers: Numbers, is_own: IsOwn, *, contracts: bool) -> Iterator[tuple[Hashable, str]]:
    """Yield each use of the launcher's own objects, also in words; `is_own` says what code is the launcher's.

    The result of the launcher's code may be a tensor: the other tensors that are used with it do not count. With
    `contracts`, arguments of a call may also be given to the function that takes its gradient.
    """
    known, held = numbers.of(module), _held(module, is_own)
    shapes: dict[Node, int] = {}
    for path, body in graph_modules(module):
        for node in body.graph.nodes:
            inputs = [each for each in node.all_input_nodes if each in held]
            seen = known if any(held[each] for each in inputs) else shapes
            words = f"uses {', '.join(map(str, inputs))} in {node.name!r} otherwise"
            for use in _given_away(node, inputs, numbers, known, contracts=contracts):
                yield use, words
            if inputs and node.op != "output" and not _is_checked(node) and not _is_plain(node, body, held):
                yield _use(node, path, numbers, seen), words
            if node not in held:
                shapes[node] = numbers.constant("any")
            elif not inputs or seen is known or _is_checked(node):
                shapes[node] = known[node]
            else:
                shapes[node] = numbers.constant(_use(node, path, numbers, shapes))


def _held(module: nn.Module, is_own: IsOwn) -> dict[Node, bool]:
    """Return the nodes that may hold one of the launcher's own objects, each with whether it certainly does."""
    held: dict[Node, bool] = {}
    entered: set[nn.Module] = set()
    before = -1
    while before != len(held) + len(entered):
        before = len(held) + len(entered)
        for _, body in graph_modules(module):
            for node in body.graph.nodes:
                if node.op == "get_attr":
                    if _is_object(body, str(node.target)):
                        held[node] = True
                elif _may_hold(node, body, held, entered, is_own):
                    held[node] = False
    return held


def _may_hold(node: Node, body: GraphModule, held: dict[Node, bool], entered: set[nn.Module], is_own: IsOwn) -> bool:
    if node.op == "placeholder":
        return body in entered
    given = any(each in held for each in node.all_input_nodes)
    if node.op == "call_module":
        inner = [each for each in body.get_submodule(str(node.target)).modules() if isinstance(each, GraphModule)]
        entered.update(inner if given else ())
        if any(each.graph.output_node() in held for each in inner):
            return True
    if node.op != "output" and (is_own(node, body) or client_of(node) is not None):
        return True
    if node.target in TRACKERS:
        return node.args[0] in held
    return given and not _is_checked(node) and not _is_plain(node, body, held)


def _is_object(body: GraphModule, path: str) -> bool:
    value: Any = body
    for step in path.split("."):
        value = getattr(value, step, None)
    return not isinstance(value, torch.Tensor) and not fits(value)


def _is_checked(node: Node) -> bool:
    """Whether the node is a call, or the wait for one, which stricter checks elsewhere cover."""
    if is_wait(node):
        return completes(node)
    return node.target in CALLS or node.target in FETCHES or is_call(node) or is_issue(node)


def _is_plain(node: Node, body: GraphModule, held: dict[Node, bool]) -> bool:
    """Whether the node is tensor code, which refuses anything but tensors, and its inputs may be tensors."""
    if any(held.get(each) for each in node.all_input_nodes):
        return False
    if node.op == "call_module":
        called = body.get_submodule(str(node.target))
        return type(called).__module__.startswith("torch.nn.") and not isinstance(called, _THROUGH)
    if node.op == "call_method":
        return node.target in _LAYOUTS
    kind, name = known_name(node.target) or ("", "")
    return kind == "operator" or (name.startswith("torch.") and not name.startswith("torch.futures."))


def _use(node: Node, path: str, numbers: Numbers, known: dict[Node, int]) -> Hashable:
    target = f"{path}.{node.target}" if node.op == "call_module" else callable_key(node.target)
    return "use", node.op, target, numbers.value(node.args, known), numbers.value(node.kwargs, known)


def _given_away(
    node: Node, inputs: list[Node], numbers: Numbers, known: dict[Node, int], *, contracts: bool
) -> Iterator[Hashable]:
    """Yield the inputs that are arguments of a remote call, besides the one that says which server it reaches."""
    if not inputs or not (node.target in CALLS or is_batch(node)):
        return
    to: Any
    calls: list[tuple[list[Any], list[Node]]]
    if is_batch(node):
        to = node.args[0]
        calls = [([each.function], _nodes((each.args, each.kwargs))) for each in items_of(node)]
        calls.append(([], _nodes(node.args[2:])))
    else:
        at = 1 if node.target in TRACKERS else 0
        to, contract = node.args[at], node.meta.get("contract") if contracts else None
        extra = (contract.gradient,) if isinstance(contract, Contract) and contract.gradient is not None else ()
        calls = [([node.args[at + 1], *extra], _nodes((node.args[:at], node.args[at + 1 :], node.kwargs)))]
    for names, values in calls:
        for value in values:
            if value in inputs:
                for name in names or [""]:
                    yield "gives", numbers.value(to, known), numbers.value(name, known), known[value]


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(value, found.append)
    return found
