"""What a rewritten graph must be, besides valid, before a launcher runs it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxlib.contracts import Contract
from fxlib.errors import WireError
from fxlib.runtime import create, is_call, is_issue, track_gradient


def screen(answer: GraphModule, original: GraphModule) -> None:
    """Check that an answer is called as the original is, and that it speaks to nobody to whom the original does not.

    Raises:
        WireError: it takes other arguments, or names a server or remote function that the original does not name.
    """
    if _arguments(answer) != _arguments(original):
        raise WireError("the rewritten graph takes other arguments than the original", where="the answer")
    if strangers := sorted(_names(answer) - _names(original)):
        raise WireError(f"the rewritten graph calls {strangers[0]!r}, and the original does not", where="the answer")


def _arguments(module: GraphModule) -> list[tuple[str, object]]:
    return [(str(node.target), node.args) for node in module.graph.nodes if node.op == "placeholder"]


def _names(module: GraphModule) -> set[str]:
    """Servers and remote functions that a graph names, and those that its contracts let a pass put in their place."""
    names: set[str] = set()
    for node in filter(_is_remote, module.graph.nodes):
        names |= {value for value in node.args if isinstance(value, str)}
        contract = node.meta.get("contract")
        if isinstance(contract, Contract):
            names |= {name for name in (contract.gradient, contract.batched_by) if name is not None}
    return names


def _is_remote(node: Node) -> bool:
    return is_call(node) or is_issue(node) or node.target in (create, track_gradient)
