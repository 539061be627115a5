"""The single calls that a batch in a graph carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxlib.runtime import batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One call of a batch."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_batch(node: Node) -> bool:
    """Whether the node issues a batch of calls."""
    return node.target is batches.issue_batch


def is_item(node: Node) -> bool:
    """Whether the node waits for one call of a batch: it carries the call's name, contract and place in the program."""
    return node.target is batches.wait_item


def items_of(batch: Node) -> tuple[Item, ...]:
    """Return the calls of a batch, in their order."""
    found: Any = batch.args[1]
    return tuple(Item(function=str(function), args=args, kwargs=kwargs) for function, args, kwargs in found)


def item_of(wait: Node) -> Item:
    """Return the call that a node waits for, of the batch that it names."""
    batch, index = wait.args
    assert isinstance(batch, Node) and isinstance(index, int), wait  # noqa: PT018, S101 - callers ask is_item first
    return items_of(batch)[index]


def waits_of(batch: Node) -> tuple[Node, ...] | None:
    """Return the wait of each call of a batch, in the order of the calls; None unless each has exactly one."""
    count = len(items_of(batch))
    waits = {user.args[1]: user for user in batch.users if is_item(user)}
    if len(batch.users) != count or waits.keys() != set(range(count)):
        return None
    return tuple(waits[index] for index in range(count))
