"""Tell from the operators of an exported program whether they compute as in training or as in evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

_FLAGS = ("train", "training", "use_input_stats")
_OF_DROPOUT = (torch.ops.aten.rand_like, torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)
"""What a dropout is made of in a program that was decomposed."""
_IN_EVALUATION = torch.ops.aten._native_batch_norm_legit_no_training.default


def training_modes(graph: Graph) -> frozenset[bool]:
    """Return the training flags as of which operators of a graph compute; none if all compute the same with either."""
    return frozenset(mode for node in graph.nodes for mode in _modes(node))


def _modes(node: Node) -> Iterator[bool]:
    if not isinstance(node.target, OpOverload):
        return
    names = [each.name for each in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if node.target is _IN_EVALUATION:
        yield False
    elif flag := next((each for each in _FLAGS if each in names), ""):
        if "running_mean" not in names or given.get("running_mean") is not None:  # a norm may have no statistics
            yield given.get(flag) is not False
    elif "dropout_p" in names:
        if given.get("dropout_p", 0.0) != 0.0:
            yield True
    elif node.target.overloadpacket in _OF_DROPOUT:
        yield True
