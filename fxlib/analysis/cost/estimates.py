"""What nodes, calls and servers take where nothing was measured: round figures, so that a plan is the same everywhere.

They are of the order of what a CPU trainer and a server on its own network take. They are meant for deciding what comes
first; a step's length in seconds is only predicted from a profile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.operators import operator_tables
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.spec.profile import ServerProfile

VIEW_S = 1e-6
"""Seconds of an operator that makes no new memory, or only looks at a tensor."""
OPERATOR_S = 5e-6
"""Seconds of any operator before it has touched an element."""
ELEMENTS_PER_S = 1e9
PRODUCT_S = 1e-4
"""Seconds of a product of matrices of unknown sizes, of a convolution, or of attention."""
FLOPS_PER_S = 2e10
ROWS = 64
"""Batch of a linear layer's input where it is unknown."""
VALUE_BYTES = 16 * 1024
"""Bytes of a value of unknown size."""
ISSUE_S = 1e-4
WAIT_S = 2e-5
SERVICE_S = 4e-4
"""Seconds from a call's issue to the arrival of its answer."""

_VIEWS = operator_tables.NEW_VIEW | {"getitem", "getattr", "size", "dim", "numel", "flatten", "contiguous", "to"}
_PRODUCTS = frozenset(
    {
        *("linear", "bilinear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum", "tensordot"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru"),
        *("scaled_dot_product_attention", "multi_head_attention_forward", "rnn_tanh"),
    }
)
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)
_HEAVY_MODULES = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder)


def server(name: str) -> ServerProfile:
    """Return what a server is taken to be."""
    return ServerProfile(name=name, round_trip_s=SERVICE_S, concurrency=16, bytes_per_s=1e9)


def value_bytes(node: Node) -> int:
    """Return the size of a node's value: from `tensor_meta` where it is known."""
    shape = _shape(node)
    if shape is None:
        return VALUE_BYTES
    dtype: torch.dtype = node.meta["tensor_meta"].dtype
    return math.prod(shape) * dtype.itemsize


class Estimator:
    """Seconds of local work. Each operator and submodule is looked up once where no shapes are known."""

    def __init__(self, module: GraphModule) -> None:
        """Take the submodules that `call_module` nodes name from `module`."""
        self._module = module
        self._by_target: dict[object, float] = {}
        self._views: dict[object, bool] = {}

    def is_view(self, node: Node) -> bool:
        """Whether the node is taken to make no memory of its own."""
        found = self._views.get(node.target)
        if found is None:
            if node.op == "call_module":
                found = isinstance(self._module.get_submodule(str(node.target)), _VIEW_MODULES)
            else:
                found = node.target in TRACKERS or _name(node) in _VIEWS
            self._views[node.target] = found
        return found

    def seconds(self, node: Node) -> float:
        """Return what the node's work takes."""
        if "tensor_meta" in node.meta:
            return self._estimate(node)
        found = self._by_target.get(node.target)
        if found is None:
            self._by_target[node.target] = found = self._estimate(node)
        return found

    def _estimate(self, node: Node) -> float:
        if node.op == "call_module":
            return _module_seconds(self._module.get_submodule(str(node.target)), node)
        name = _name(node)
        if name in _VIEWS:
            return VIEW_S
        if name in _PRODUCTS:
            return _product_seconds(node)
        return OPERATOR_S + _elements(node) / ELEMENTS_PER_S


def _module_seconds(module: nn.Module, node: Node) -> float:
    parts = [part for part in module.modules() if not list(part.children())]
    return sum(_leaf_seconds(part, node) for part in parts) or VIEW_S


def _leaf_seconds(module: nn.Module, node: Node) -> float:
    if isinstance(module, nn.Linear):
        rows = max(_elements(node) // max(module.out_features, 1), 1) if _shape(node) else ROWS
        return OPERATOR_S + 2 * rows * module.in_features * module.out_features / FLOPS_PER_S
    if isinstance(module, _HEAVY_MODULES):
        return PRODUCT_S
    return VIEW_S if isinstance(module, _VIEW_MODULES) else OPERATOR_S + _elements(node) / ELEMENTS_PER_S


def _product_seconds(node: Node) -> float:
    """Multiply the result's elements by the width of the first argument, which they are sums over."""
    first: Any = node.args[0] if node.args else None
    width = _shape(first)[-1:] if isinstance(first, Node) and _shape(first) else None  # type: ignore[index]
    if _shape(node) is None or not width:
        return PRODUCT_S
    return OPERATOR_S + 2 * _elements(node) * width[0] / FLOPS_PER_S


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _elements(node: Node) -> int:
    return math.prod(_shape(node) or (0,))


def _shape(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    if shape is None or not all(isinstance(each, int) for each in shape):
        return None
    return tuple(shape)
