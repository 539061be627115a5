"""Which values lie in torch's default order, dimension by dimension, in a program whose inputs do.

What joins values of several orders gives its result the first of them that decides, so that a convolution that goes
channels last would change the strides of what it meets. Where all lie in the default order, so does the result.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.leaf_modules import attribute
from fxlib.runtime.submodules import submodule

_KEEPING = words.ANY_LAYOUT | words.in_all_forms(
    """
    log layer_norm group_norm softmax stack sum amax linear view reshape flatten getitem chunk split narrow slice
    unsqueeze clone detach float double half bfloat16 zeros_like ones_like embedding to pixel_shuffle pixel_unshuffle
    size dim numel floordiv mod int
    """
)
_KEEPING_MODULES = (
    *words.ANY_LAYOUT_MODULES,
    *(f"torch.nn.modules.{name}" for name in ("flatten", "linear", "normalization", "sparse")),
)
_QUESTIONS = frozenset({"shape", "dtype", "device", "ndim"})


def in_default_order(module: GraphModule, effects: Effects) -> set[Node]:
    """Return the nodes whose values lie in the default order, as far as is known, in one pass over the program."""
    found: set[Node] = set()
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        if _is_made_contiguous(node) or (_is(module, node, behaviour) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is(module: GraphModule, node: Node, behaviour: Behaviour) -> bool:
    """Whether a node's value lies in the default order if those that it is given do."""
    if behaviour.part is Part.INPUT:
        return True
    if behaviour.part is Part.STATE:
        value = attribute(module, str(node.target))
        return not isinstance(value, torch.Tensor) or _is_contiguous(value)
    if behaviour.part is not Part.LOCAL or behaviour.operator is None:
        return False
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        known = type(called).__module__.startswith(_KEEPING_MODULES) and not isinstance(called, nn.MultiheadAttention)
        return known and all(map(_is_contiguous, called.parameters()))
    return _keeps_order(node, behaviour.operator.name)


def _is_contiguous(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.is_contiguous()


def _is_made_contiguous(node: Node) -> bool:
    return node.op == "call_method" and node.target == "contiguous" and len(node.args) == 1 and not node.kwargs


def _keeps_order(node: Node, name: str) -> bool:
    told = (*node.args, *node.kwargs.values())
    if any(isinstance(each, torch.memory_format) for each in told):
        return False
    if name == "getattr":
        return node.args[1] in _QUESTIONS
    return name in _KEEPING
