"""Functional collectives as calls that are issued and waited for, over the process groups of `torch.distributed`.

The operators are those of `torch.ops._c10d_functional`, which leave their inputs as they are and return before they
are complete; `wait_tensor` completes them. Since torch gives them gradients, these operators have gradients, too:
backward runs the collectives that belong to them, in the reverse of the order in which they were issued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# This import gives the operators their gradients.
import torch.distributed._functional_collectives
from torch.fx.node import map_aggregate

from fxlib.errors import ContractError

_NAMES = (
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"),
    *("all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
OPERATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.ops._c10d_functional, name).default
    for name in _NAMES
    if hasattr(torch.ops._c10d_functional, name)
}
"""The collectives that can be issued: they read their input, return memory of their own, and can be waited for."""


def collective(operation: str, args: tuple[Any, ...]) -> Any:
    """Run one collective and return its result: a tensor, or a list of them if it is coalesced.

    Args:
        operation: a name among `OPERATIONS`.
        args: the operator's arguments; the last one is the name of the process group.

    Raises:
        ContractError: no such operation is known.
        RuntimeError: the group is unknown in this process, or a member of it failed.
    """
    return wait_collective(issue_collective(operation, args))


def issue_collective(operation: str, args: tuple[Any, ...]) -> Any:
    """Start `collective` with the same arguments; its inputs must stay as they are until the wait.

    Returns:
        The collective in flight, which `wait_collective` takes.

    Raises:
        ContractError: no such operation is known.
        RuntimeError: the collective could not be started.
    """
    if operation not in OPERATIONS:
        known = f"There are: {', '.join(OPERATIONS)}."
        raise ContractError(f"no collective is called {operation!r}", where="collective", hint=known)
    return OPERATIONS[operation](*args)


def wait_collective(started: Any) -> Any:
    """Block until a collective is complete and return its result.

    Raises:
        RuntimeError: a member of the group failed, or the group's timeout passed.
    """
    return map_aggregate(started, torch.ops._c10d_functional.wait_tensor.default)
