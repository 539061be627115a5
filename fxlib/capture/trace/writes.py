"""Find the writes with which a graph would not do what the program does: by `out=`, and in-place changes of numbers.

At run time, torch refuses to write by `out=` to a remote result that takes a gradient. For `offset += 1`, torch.fx
generates `offset += 1; iadd = offset`, which is what the program does with a tensor; with a number, a later read of the
old value would get the new one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxlib.capture.handled_errors import capture_error
from fxlib.capture.metadata import attribute_of
from fxlib.capture.trace.values import IN_PLACE
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.program_modes import grad_mode_after
from fxlib.runtime.submodules import submodule

_WITHOUT_HISTORY = frozenset({"detach", "detach_"})


def refuse_out(graph: Graph, *, grad_enabled: bool) -> None:
    """Refuse to write by `out=` to a remote result whose gradient is to be pushed, or to a value made from it.

    Raises:
        CaptureError: an operator does so in grad mode, in which torch writes by `out=` to nothing that takes a
            gradient.
    """
    for node in graph.nodes:
        grad_enabled = grad_mode_after(node, grad_enabled)
        if not grad_enabled or node.kwargs.get("out") is None:
            continue
        written: list[Node] = []
        map_arg(node.kwargs["out"], written.append)
        for tracked in filter(None, map(_tracked_behind, written)):
            raise capture_error(
                f"out= of {node.name} is a remote result whose gradient is to be pushed by {tracked.args[2]!r}, and "
                "torch writes by out= to nothing that takes a gradient",
                hint="Write with copy_ or another method that works in place, or to a new tensor.",
                where=str(node.meta.get("source", "")),
            )


def _tracked_behind(node: Node) -> Node | None:
    """Follow the first arguments of nodes back to a tracked result, and return that, or None."""
    value: object = node
    while isinstance(value, Node) and value.target not in TRACKERS:
        value = value.args[0] if value.args and value.target not in _WITHOUT_HISTORY else None
    return value if isinstance(value, Node) else None


def refuse_shared_writes(graph: Graph, root: nn.Module, shared: Mapping[str, str]) -> None:
    """Refuse a graph that writes to memory that it shares with a Python object.

    The forward may have read that object, or made it; in that case, each run makes another.

    Args:
        graph: the graph of a trace.
        root: the module that holds the modules that the graph calls.
        shared: the paths of the tensors that share memory, each with the statement that made it.

    Raises:
        CaptureError: the graph writes to such memory.
    """
    for node in graph.nodes if shared else ():
        for path in _state_written(node, root):
            if path in shared:
                raise capture_error(
                    "the forward writes to a tensor that shares its memory with an object of Python's",
                    hint="Write to a copy: torch.tensor(values), or tensor.clone().",
                    where=str(node.meta.get("source", "") or shared[path]),
                )


def writes_to(graph: Graph, root: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether a graph, as far as it is written, writes to the memory of a tensor that was there before."""
    held = (attribute_of(root, path) for node in graph.nodes for path in _state_written(node, root))
    return any(isinstance(each, torch.Tensor) and _is_of(each, tensor) for each in held)


def _is_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _state_written(node: Node, root: nn.Module) -> Iterator[str]:
    """Yield the paths of the tensors that were there before, to which a node writes."""
    for written in _written_by(node, root):
        base: object = written
        while isinstance(base, Node) and base.op != "get_attr":
            base = base.args[0] if base.args else None
        if isinstance(base, Node):
            yield str(base.target)


def _written_by(node: Node, root: nn.Module) -> list[Node]:
    """Return the arguments to which a node writes, as its name tells."""
    written: list[Node] = []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = node.op != "call_module" and name.endswith("_") and not name.endswith("__")
    named |= node.target in IN_PLACE or node.target is operator.setitem or bool(node.kwargs.get("inplace"))
    if node.op == "call_module":
        named = bool(getattr(submodule(root, str(node.target)), "inplace", False))
    if named and node.args:
        map_arg(node.args[0], written.append)
    map_arg(node.kwargs.get("out"), written.append)
    return written


def protect_old_values(graph: Graph) -> None:
    """Let an in-place operator work under a second name if the first, which may be a number's, is read again."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in IN_PLACE or not isinstance(node.args[0], Node):
            continue
        old = node.args[0]
        if not _is_tensor(old) and any(place[user] > place[node] for user in old.users):
            with graph.inserting_before(node):
                second = graph.call_function(operator.getitem, ((old,), 0))
            second.meta.update({key: node.meta[key] for key in ("source", "stack_trace") if key in node.meta})
            place[second] = place[node]
            node.update_arg(0, second)


def _is_tensor(node: Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return node.op in ("get_attr", "call_module") or (node.op == "call_function" and module.startswith("torch."))
