"""Choose the exception that a rewritten forward raises: the one that the program as captured would have raised.

A rewrite moves nodes past one another, so the node that fails first need not be the one at which the captured program
would have failed. Every node knows its position in that program (`meta["order"]`). When one fails, the nodes that
stand before it in program order and have not run yet run now, in program order: waits of calls in flight above all.
The first error among them is the program's; if there is none, the failed node's error is. Calls in flight that stand
after the failed node are left to drain. Calls of a batch that has not been issued yet are made singly, since arguments
of the other calls may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, cast

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fxlib.runtime.ops.operators import call_now
from fxlib.runtime.ops.registry import is_batch, is_item, item_of
from fxlib.runtime.tracking.forward_context import THREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The point at which a forward stopped: nodes before the failed one have run; `values` are those still alive."""

    nodes: Sequence[Node]
    failed: int
    values: dict[str, Any]


def first_error(module: GraphModule, code: CodeType, error: BaseException) -> Exception | None:
    """Return the error that the captured program would have met before a node's, and leave the modes it entered.

    Args:
        module: the module whose graph failed.
        code: the code of its generated forward.
        error: the error that the forward raised.
    """
    stop = locate(module, code, error)
    return None if stop is None else first_error_at(module, stop, error)


def first_error_at(module: GraphModule, stop: Failure, error: BaseException) -> Exception | None:
    """Return the error that the captured program would have met before the failed node's, and leave its modes."""
    # An interrupt reaches the program at once: nothing is waited for.
    earlier = earlier_error(module, stop) if isinstance(error, Exception) else None
    leave_modes(stop)
    return earlier


def locate(module: GraphModule, code: CodeType, error: BaseException) -> Failure | None:
    """Return the node that raised, by the generated code's line map; None if the error came from outside that code."""
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code is not code:
        step = step.tb_next
    if step is None:
        return None
    lines: dict[int, int | None] = module._lineno_map or {}
    index = lines.get(step.tb_lineno - module._prologue_start)
    if index is None:
        return None
    return Failure(nodes=list(module.graph.nodes), failed=index, values=dict(step.tb_frame.f_locals))


def earlier_error(module: GraphModule, failure: Failure) -> Exception | None:
    """Run the nodes that the captured program would have run before the failed node; return the first error, if any."""
    order = program_order(failure.nodes)
    ran, rest = failure.nodes[: failure.failed], failure.nodes[failure.failed + 1 :]
    limit = order[failure.nodes[failure.failed]]
    pending = sorted((node for node in rest if order[node] < limit), key=order.__getitem__)
    if not pending:
        return None
    if THREAD.forward is not None:
        THREAD.forward.expects_objects = True  # an error is on its way: what a server returns changes nothing any more
    interpreter = Interpreter(module, garbage_collect_values=False)
    interpreter.env = {node: failure.values[node.name] for node in ran if node.name in failure.values}
    for node in pending:
        try:
            _run(interpreter, node)
        except Exception as error:  # noqa: BLE001 - it is raised in place of the failed node's
            return error
    return None


def _run(interpreter: Interpreter, node: Node) -> None:
    """Run a node if its inputs are there; other nodes need something that the program before the failed node lacks."""
    values = interpreter.env
    if is_batch(node):
        return
    if is_item(node) and node.args[0] not in values:
        _call_alone(interpreter, node)
    elif all(value in values for value in node.all_input_nodes):
        values[node] = interpreter.run_node(node)


def _call_alone(interpreter: Interpreter, wait: Node) -> None:
    batch, item = wait.all_input_nodes[0], item_of(wait)
    to, timeout = batch.args[0], cast("float | None", batch.args[2])
    needed: list[Node] = []
    map_arg((to, item.args, item.kwargs), needed.append)
    if all(value in interpreter.env for value in needed):
        given = map_arg((to, item.args, item.kwargs), interpreter.env.__getitem__)
        destination, args, kwargs = given
        interpreter.env[wait] = call_now(destination, item.function, args, kwargs, timeout)


def leave_modes(failure: Failure) -> None:
    """Leave the autocast blocks that the forward has entered and not left, innermost first, as `with` would."""
    ran = failure.nodes[: failure.failed]
    left = {node.args[0] for node in ran if node.target is torch.amp.autocast_mode._exit_autocast}
    for node in reversed(ran):
        if node.target is torch.amp.autocast_mode._enter_autocast and node not in left:
            torch.amp.autocast_mode._exit_autocast(failure.values[node.name])


def program_order(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return each node's position in the program as captured; a node that a pass made has that of its latest input."""
    order: dict[Node, int] = {}
    for node in nodes:
        known = node.meta.get("order")
        if not isinstance(known, int):
            known = max((order.get(value, 0) for value in node.all_input_nodes), default=0)
        order[node] = known
    return order
