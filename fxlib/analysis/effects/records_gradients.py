"""Whether a module is one for inference: its values may be computed once, and take no gradients."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from fxlib.runtime.guards.folded_weights import FOLDED


def records_gradients(module: GraphModule) -> bool:
    """Whether gradients may be recorded when the module runs: it was captured so, and no pass has left them out.

    Values that a pass computed from weights which take a gradient leave it out, and the original runs where one is
    wanted. Those computed from buffers alone leave nothing out.
    """
    state = getattr(module, "_fxlib", None)
    recorded = state is None or state.conditions.grad_enabled
    weights = {name for node in module.graph.nodes for name in node.meta.get(FOLDED, ())}
    return recorded and not any(_takes_gradient(module, name) for name in weights)


def _takes_gradient(module: GraphModule, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return bool(getattr(module.get_submodule(path), leaf).requires_grad)


def may_leave_gradients(module: GraphModule) -> bool:
    """Whether the graph, run without recording, records none: it does not turn recording on by itself.

    The end of a block without recording turns it on in a graph that was captured with recording on.
    """
    return not any(node.target is torch._C._set_grad_enabled and node.args[0] for node in module.graph.nodes)
