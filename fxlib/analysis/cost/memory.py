"""How much memory the values of a forward hold at once, in a given order of its nodes.

A value lives from the node that makes it to the last that uses it or a view of it, as in the code that `torch.fx`
generates. A result counts from the issue of its call, since its answer may come at any time, and the arguments until
the wait. What autograd keeps for backward is the same in every order once the forward is over, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import Node

from fxlib.analysis.cost.costs import Costs


def peak_bytes(order: Sequence[Node], costs: Costs) -> int:
    """Return the most that is held at once, in linear time."""
    roots: dict[Node, Node] = {}
    last: dict[Node, Node] = {}
    for node in order:
        source = node.all_input_nodes[0] if node in costs.views and node.all_input_nodes else None
        roots[node] = node if source is None else roots[source]
        last.update(dict.fromkeys(_held_by(node, roots, costs), node))
    ends: dict[Node, list[Node]] = {}
    for value, node in last.items():
        ends.setdefault(node, []).append(value)
    held = most = 0
    for node in order:
        held += _made(node, costs)
        most = max(most, held)
        held -= sum(_left_by(value, costs) for value in ends.get(node, ()))
    return most


def _held_by(node: Node, roots: dict[Node, Node], costs: Costs) -> Iterator[Node]:
    """Yield what must be there while the node runs: itself, its inputs, and what a call in flight holds of its own."""
    yield roots[node]
    for value in node.all_input_nodes:
        yield roots[value]
        if value in costs.messages:
            yield from (roots[each] for each in value.all_input_nodes)


def _made(node: Node, costs: Costs) -> int:
    if (message := costs.messages.get(node)) is not None:
        return message.response_bytes
    return 0 if node in costs.results else costs.value_bytes[node]  # a wait makes nothing that its issue has not


def _left_by(value: Node, costs: Costs) -> int:
    """Bytes that go when a value goes: of an issued call's, those of results that nobody waits for."""
    message = costs.messages.get(value)
    if message is None or value in costs.results:
        return costs.value_bytes[value]
    return message.response_bytes - sum(costs.value_bytes[wait] for wait in value.users if wait in costs.results)
