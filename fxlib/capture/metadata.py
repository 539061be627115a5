"""Annotate every node of a captured graph with its position in the program and whether it takes a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxlib.runtime import is_call, is_wait
from fxlib.runtime.ops.calls import COLLECTIVE, kind_of
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.program_modes import grad_mode_after

# The results of these are integers or booleans, whatever their arguments are.
_WITHOUT_GRADIENT = frozenset(
    {"long", "int", "bool", "byte", "short", "char", "argmax", "argmin", "argsort", "eq", "ne", "lt", "le", "gt", "ge"}
    | {"isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor", "nonzero", "bincount"}
    | {
        "searchsorted",
        "bucketize",
        "detach",
        "size",
        "dim",
        "numel",
        "randint",
        "randperm",
        "get_worker_info",
        "resolve",
    }
)


def annotate(graph: Graph, root: nn.Module) -> None:
    """Set `meta["order"]` on every node, and `meta["requires_grad"]` where it is known."""
    grad_enabled = torch.is_grad_enabled()
    for order, node in enumerate(graph.nodes):
        node.meta["order"] = order
        grad_enabled = grad_mode_after(node, grad_enabled)
        known = _requires_grad(node, root, grad_enabled=grad_enabled)
        if known is not None:
            node.meta["requires_grad"] = known


def _requires_grad(node: Node, root: nn.Module, *, grad_enabled: bool) -> bool | None:
    if node.op == "get_attr":
        value = attribute_of(root, str(node.target))
        if isinstance(value, nn.Parameter) and (value.is_floating_point() or value.is_complex()):
            return True  # a parameter frozen now may be unfrozen by the time of a step
        return bool(getattr(value, "requires_grad", False))
    if node.op in ("placeholder", "output") or node.kwargs.get("requires_grad"):
        return None
    name = _name(node.target)
    if node.target in TRACKERS and grad_enabled:
        return None  # it takes a gradient if the result has a floating type, which only the server knows
    if name in _WITHOUT_GRADIENT and node.op != "call_module":
        return False
    remote = (is_call(node) or is_wait(node)) and kind_of(node) is not COLLECTIVE
    if remote or node.op == "call_module" or node.target is getattr:
        return None
    return _from_inputs(node, name, grad_enabled=grad_enabled)


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _from_inputs(node: Node, name: str, *, grad_enabled: bool) -> bool | None:
    """Return False if the inputs or the grad mode show that the result takes no gradient, or None if it is unknown."""
    inputs = [value.meta.get("requires_grad") for value in node.all_input_nodes]
    if all(value is False for value in inputs) and not name.endswith("requires_grad_"):
        return False
    in_place = name.endswith("_") or name in ("setitem", "__setitem__") or "out" in node.kwargs
    return None if grad_enabled or in_place else False


def attribute_of(root: Any, path: str) -> Any:
    """Return the value that a `get_attr` node with this path reads, or None if there is no such attribute."""
    for part in path.split("."):
        root = getattr(root, part, None)
    return root
