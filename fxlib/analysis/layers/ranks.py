"""How many dimensions the tensors of a graph have, where it tells, or which of its inputs has as many."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.operators.schemas import Operator
from fxlib.runtime.guards.folded_weights import RANK
from fxlib.runtime.submodules import submodule

Rank = int | Node
"""A number of dimensions, or the placeholder that has as many."""

_KEEPING = frozenset(
    f"{name}{form}"
    for name in (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("linear", "batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu"),
        *("mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softplus", "softmax", "log_softmax", "dropout"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"),
        *("add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv", "neg", "clamp", "cat"),
        *("contiguous", "clone", "detach", "float", "double", "half", "bfloat16"),
    )
    for form in ("", "_")
)
_REDUCING = frozenset({"mean", "sum", "amax", "amin"})
"""Operators that keep the number of dimensions where their third argument says so."""
_KEEPING_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "dropout", "instancenorm", "linear", "normalization", "pooling")
)
_STATED: dict[type[nn.Module], int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""Modules that take tensors of one rank alone."""


def ranks_of(module: GraphModule, effects: Effects) -> dict[Node, Rank]:
    """Return the ranks of all values of which the graph, whose effects are given, tells, in one pass over it."""
    found: dict[Node, Rank] = {}
    has_names = type(module.graph._codegen) is CodeGen
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        rank: Rank | None = _noted(node)
        if rank is None and node.op == "placeholder" and has_names:
            rank = node
        elif rank is None and node.op not in ("placeholder", "get_attr", "output"):
            rank = _of_work(module, node, behaviour.operator, found)
        if rank is not None:
            found[node] = rank
    return found


def _noted(node: Node) -> int | None:
    shape = getattr(node.meta.get("val", node.meta.get("tensor_meta")), "shape", None)
    if shape is not None:
        return len(shape)
    return None if node.op == "placeholder" else node.meta.get(RANK)


def _of_work(module: GraphModule, node: Node, operator: Operator | None, found: dict[Node, Rank]) -> Rank | None:
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        if type(called) is nn.Flatten:
            return 2 if (called.start_dim, called.end_dim) == (1, -1) else None
        keeps = type(called).__module__.startswith(_KEEPING_MODULES)
        return _STATED.get(type(called)) or (_shared(node, found) if keeps else None)
    name = "" if operator is None else operator.name
    if name == "flatten":
        return 2 if (*node.args[1:], *node.kwargs.values()) == (1,) else None
    if name in ("view", "reshape"):
        sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return len(sizes) if len(sizes) > 1 else None
    if name in _REDUCING:
        told = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", node.kwargs.get("keepdims", False))
        return _shared(node, found) if told is True else None
    return _shared(node, found) if name in _KEEPING else None


def _shared(node: Node, found: dict[Node, Rank]) -> Rank | None:
    """Return the rank that all inputs share; parameters do not count, which are of one rank for each operator."""
    ranks = {found.get(value) for value in node.all_input_nodes if value.op != "get_attr"}
    return ranks.pop() if len(ranks) == 1 else None
