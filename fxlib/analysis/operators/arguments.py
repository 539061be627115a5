"""The arguments of a node by the names that its target gives them, however they were written."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.fx import Node

from fxlib.analysis.operators.schemas import facts_of


@functools.cache
def names_of(target: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order; empty if they are not known."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema tells
        found = facts_of(target)
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{found.name}") if found is not None else ()
        return tuple(argument.name for argument in schemas[0].arguments) if schemas else ()


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that a `call_function` node gives, by name; those left out have no entry."""
    return dict(zip(names_of(node.target), node.args, strict=False)) | dict(node.kwargs)


def replace_arguments(node: Node, **values: Any) -> None:
    """Give a `call_function` node other values for some of its arguments, by name; what it leaves out may be added."""
    names = names_of(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in values.items():
        place = names.index(name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs
