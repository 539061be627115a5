"""Tell from a graph in which modes its nodes run: whether gradients are recorded, and as in training or evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

_FLAGS = ("train", "training", "use_input_stats")
_IN_EVALUATION = torch.ops.aten._native_batch_norm_legit_no_training.default


def grad_mode_after(node: Node, before: bool) -> bool:
    """Return the grad mode after a node, given the one before it."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else before


def training_modes(graph: Graph) -> frozenset[bool]:
    """Return the training flag as of which the operators of a graph compute; none if no flag, or either, says it all.

    Of a dropout in a program that was decomposed, nothing is left but random numbers, which tell nothing. Where a norm
    computes as in evaluation and a dropout as in training, the program has set them so, whatever the flag was.
    """
    found = frozenset(mode for node in graph.nodes for mode in _modes(node))
    return found if len(found) == 1 else frozenset()


def _modes(node: Node) -> Iterator[bool]:
    if not isinstance(node.target, OpOverload):
        return
    arguments = node.target._schema.arguments
    names = [each.name for each in arguments]
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    if node.target is _IN_EVALUATION:
        yield False
    elif flag := next((each for each in _FLAGS if each in names), ""):
        has_statistics = "momentum" not in names or given.get("running_mean") is not None
        drops = 0 not in (given.get("p"), given.get("dropout"))
        if has_statistics and drops:
            yield given[flag] is not False
    elif given.get("dropout_p", 0.0) != 0.0:
        yield True
