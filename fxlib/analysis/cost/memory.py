"""How much memory the values of a forward hold at once, in a given order of its nodes.

A value is held from the first node that needs it to the last, as in the code that `torch.fx` generates: `live_bytes`
adds that up, whatever the values are and wherever their sizes come from. What autograd keeps for backward is the same
in every order once the forward is over, and what an operator needs only while it runs is nobody's value: both are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch.fx import Node

from fxlib.analysis.cost.costs import Costs

Value = TypeVar("Value", bound=Hashable)


def live_bytes(
    order: Sequence[Node], needed: Callable[[Node], Iterable[Value]], size: Callable[[Value], int]
) -> Iterator[int]:
    """Yield how much is held while each node of an order runs, in linear time.

    Args:
        order: the nodes.
        needed: the values that have to be there while a node runs, its own among them.
        size: the bytes of a value.
    """
    begun, ended = [0] * len(order), [0] * len(order)
    last: dict[Value, int] = {}
    for place, node in enumerate(order):
        for value in needed(node):
            if value not in last:
                begun[place] += size(value)
            last[value] = place
    for value, place in last.items():
        ended[place] += size(value)
    held = 0
    for begins, ends in zip(begun, ended, strict=True):
        held += begins
        yield held
        held -= ends


def peak_bytes(order: Sequence[Node], costs: Costs) -> int:
    """Return the most that is held at once, by the sizes that the costs tell.

    A result counts from the issue of its call, since its answer may come at any time, and the arguments until the wait.
    """
    messages, sizes = costs.messages, costs.value_bytes
    waits = {node: [each for each in node.users if each in costs.results] for node in messages.keys() - costs.results}
    roots: dict[Node, Node] = {}
    for node in order:
        inputs = node.all_input_nodes
        roots[node] = roots[inputs[0]] if node in costs.views and inputs else node

    def needed(node: Node) -> Iterator[Node]:
        yield roots[node]
        yield from waits.get(node, ())
        for value in node.all_input_nodes:
            yield roots[value]
            if value in messages:
                yield from (roots[each] for each in value.all_input_nodes)

    def size(value: Node) -> int:
        if value not in waits:
            return sizes[value]
        return messages[value].response_bytes - sum(sizes[wait] for wait in waits[value])  # what no wait takes

    return max(live_bytes(order, needed, size), default=0)
