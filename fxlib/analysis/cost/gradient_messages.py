"""Gradients of remote results on their way home, as the cost model sees them: which travel together, and how.

As `gradients.pushes` sends them: neighbours to one server whose contracts let them be batched share a message. In
it, pushes to different parts of the server's state run side by side, those to one part in order, and all of them in
order where some push may touch any part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from fxlib.analysis.cost.costs import ITEM_S, CallCost, Costs, batch_work_s, work_s
from fxlib.errors import ContractError
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.spec.contract import Contract, contract_of
from fxlib.spec.profile import Push, ServerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one remote result."""

    call: CallCost
    """The call whose result has the gradient."""
    push: Push
    batchable: bool
    part: Hashable
    """The part of its server's state that it touches; None: it may touch all."""
    travels: bool
    """Whether it may be in flight while others are."""

    @property
    def cost(self) -> CallCost:
        """The cost of the push as a call by itself."""
        push = self.push
        return replace(
            self.call,
            function=push.function,
            issue_s=push.issue_s,
            service_s=push.service_s.median,
            request_bytes=push.request_bytes,
            response_bytes=0,
        )


def gradients(order: Iterable[Node], costs: Costs) -> list[Gradient]:
    """Return the gradients that are pushed, in program order."""
    found: list[tuple[object, Gradient]] = []
    for node in order:
        if node.target in TRACKERS and (call := _result_in(node, costs)) is not None and call.push is not None:
            contract = _contract(call.push.function)
            gradient = Gradient(
                call=call,
                push=call.push,
                batchable=contract is not None and contract.batchable,
                part=_part(node, contract),
                travels=contract is not None and node.target is ops.send_gradient,
            )
            found.append((node.args[-1], gradient))
    return [gradient for _, gradient in sorted(found, key=_place)]


def grouped_in_messages(group: Iterable[Gradient]) -> list[list[Gradient]]:
    """Put neighbours that travel in one message into one list each; all are for one server."""
    messages: list[list[Gradient]] = []
    is_open = False
    for gradient in group:
        if gradient.batchable and is_open:
            messages[-1].append(gradient)
        else:
            messages.append([gradient])
        is_open = gradient.batchable
    return messages


def issue_s(message: Sequence[Gradient]) -> float:
    """Return what sending a message takes."""
    return max(each.push.issue_s for each in message) + ITEM_S * (len(message) - 1)


def service_s(message: Sequence[Gradient], server: ServerProfile) -> float:
    """Return what passes from there to its answer: one round trip, all bytes, and the work on the server."""
    chains: dict[Hashable, list[float]] = {}
    in_order = any(each.part is None for each in message)
    costs = [each.cost for each in message]
    works = [work_s(cost, server) for cost in costs]
    for gradient, seconds in zip(message, works, strict=True):
        chains.setdefault(None if in_order else gradient.part, []).append(seconds)
    transfers = [transfer_s([each], server) for each in message]
    ways = [
        max(cost.service_s - transfer - work, 0.0) for cost, transfer, work in zip(costs, transfers, works, strict=True)
    ]
    return max(ways) + sum(transfers) + batch_work_s([sum(each) for each in chains.values()], server, serial=False)


def transfer_s(message: Iterable[Gradient], server: ServerProfile) -> float:
    """Return what of that the bytes spend on the server's link."""
    return sum(each.push.request_bytes for each in message) / server.bytes_per_s


def _place(found: tuple[object, Gradient]) -> int:
    return found[0] if isinstance(found[0], int) else 0


def _result_in(node: Node, costs: Costs) -> CallCost | None:
    return next((costs.results[each] for each in node.all_input_nodes[:1] if each in costs.results), None)


def _contract(function: str) -> Contract | None:
    try:
        return contract_of(functions.resolve(function))
    except ContractError:
        return None


def _part(node: Node, contract: Contract | None) -> Hashable:
    """Return the names of the state that a push touches, and the value that says which part of it."""
    args, kwargs = node.args[3], node.args[4]
    if contract is None or not isinstance(args, Sequence) or not isinstance(kwargs, dict):
        return None
    given = contract.part_of(args, kwargs)
    return None if given is None else (contract.reads | contract.writes, given)
