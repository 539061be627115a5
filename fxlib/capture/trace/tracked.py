"""What torch would refuse at run time because a remote result takes a gradient, refused at capture."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxlib.capture.faults import fault
from fxlib.runtime.ops.registry import TRACKERS

_WITHOUT_HISTORY = frozenset({"detach", "detach_"})


def refuse_out(graph: Graph, *, grad_enabled: bool) -> None:
    """Refuse to write by `out=` to a remote result whose gradient is to be pushed, or to what is made of it.

    Raises:
        CaptureError: an operator does so in grad mode; torch writes by `out=` to nothing that takes a gradient.
    """
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        if not grad_enabled or node.kwargs.get("out") is None:
            continue
        written: list[Node] = []
        map_arg(node.kwargs["out"], written.append)
        for tracked in filter(None, map(_tracked_behind, written)):
            raise fault(
                f"out= of {node.name} is a remote result whose gradient is to be pushed by {tracked.args[2]!r}, and "
                "torch writes by out= to nothing that takes a gradient",
                hint="Write with copy_ or another method that works in place, or to a new tensor.",
                where=str(node.meta.get("source", "")),
            )


def _tracked_behind(node: Node) -> Node | None:
    """Follow what a node is made of, its first argument, up to a tracked result."""
    value: object = node
    while isinstance(value, Node) and value.target not in TRACKERS:
        value = value.args[0] if value.args and value.target not in _WITHOUT_HISTORY else None
    return value if isinstance(value, Node) else None
