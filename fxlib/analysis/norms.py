"""Batch norms with fixed statistics, in any form of calling one, as a scale and a shift for each channel.

A norm is found by what the node computes. Which norms may be folded, or computed on integers, is for passes to say.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from fxlib.analysis.layers import Weight
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.analysis.operators.schemas import is_known
from fxlib.reasons import Reason
from fxlib.runtime.functions import table_key
from fxlib.runtime.guards.folded_weights import counter_of
from fxlib.runtime.submodules import submodule

_ATTRIBUTES = frozenset({"ndim", "shape", "dtype", "device"})
_METHODS = frozenset({"dim", "ndimension", "size", "numel", "nelement"})


_MODULES = {nn.BatchNorm1d: None, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""Classes of norms, and the rank that they require."""
_NORMS = tuple(_MODULES)
_PLAIN = frozenset({F.batch_norm, torch.batch_norm, torch.ops.aten.batch_norm.default})
_WITH_STATISTICS = frozenset(
    {torch.ops.aten._native_batch_norm_legit_no_training.default, torch.ops.aten.native_batch_norm.default}
)
"""Operators that return statistics, too; the result is the first of three."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """One batch norm: `(x - mean) / sqrt(variance + eps) * weight + bias`, with one figure of each per channel."""

    node: Node
    """The node whose value is the normalized tensor."""
    call: Node
    """The node that computes it, which differs from `node` if the operator also returns statistics."""
    input: Node
    mean: Weight
    variance: Weight
    weight: Weight | None
    bias: Weight | None
    eps: float
    rank: int | None
    """The only rank that it accepts; None: any from 2 on."""

    @property
    def weights(self) -> list[Weight]:
        """All tensors of the norm."""
        return [each for each in (self.mean, self.variance, self.weight, self.bias) if each is not None]


ScaleAndShift = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def scales_and_shifts(norms: Iterable[Norm]) -> dict[Norm, ScaleAndShift]:
    """Return each norm as `x * scale + shift`, in float64, with one figure per channel.

    Norms of one kind are computed together: the tensors are small, and there may be thousands.
    """
    kinds: dict[Hashable, list[Norm]] = {}
    for norm in norms:
        kind = (norm.mean.tensor.device, norm.eps, norm.weight is None, norm.bias is None)
        kinds.setdefault(kind, []).append(norm)
    found: dict[Norm, ScaleAndShift] = {}
    for those in kinds.values():
        scale = torch.rsqrt(_joined([each.variance for each in those]) + those[0].eps)
        if weights := [each.weight for each in those if each.weight is not None]:
            scale = scale * _joined(weights)
        shift = _joined([each.mean for each in those]) * -scale
        if biases := [each.bias for each in those if each.bias is not None]:
            shift = shift + _joined(biases)
        sizes = [each.mean.tensor.numel() for each in those]
        found |= zip(those, zip(scale.split(sizes), shift.split(sizes), strict=True), strict=True)
    return found


def _joined(weights: Sequence[Weight]) -> torch.Tensor:
    tensors = (each.tensor for each in weights)
    return torch.cat([each if each.dim() == 1 else each.flatten() for each in tensors]).double()


def norm_of(module: GraphModule, node: Node) -> Norm | Reason | None:
    """Return a node as a norm; the reason if its scale and shift are not fixed; None if it is not a norm."""
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        if not isinstance(called, _NORMS):
            return None
        if type(called) not in _MODULES or not is_known(called):
            return Reason.OPAQUE_MODULE
        return _of_module(node, called)
    return _of_function(module, node) if node.op == "call_function" else None


def _of_module(node: Node, norm: Any) -> Norm | Reason | None:
    if norm.training:
        return Reason.NORM_IN_TRAINING
    path, given = str(node.target), (*node.args, *node.kwargs.values())
    mean, variance = Weight.held(norm, path, "running_mean"), Weight.held(norm, path, "running_var")
    if mean is None or variance is None:
        return Reason.NORM_OF_BATCH
    if len(given) != 1 or not isinstance(given[0], Node):
        return None
    return Norm(
        node=node,
        call=node,
        input=given[0],
        mean=mean,
        variance=variance,
        weight=Weight.held(norm, path, "weight"),
        bias=Weight.held(norm, path, "bias"),
        eps=norm.eps,
        rank=_MODULES[type(norm)],
    )


def _of_function(module: GraphModule, node: Node) -> Norm | Reason | None:
    call = node
    if node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[1] == 0:
        call = node.args[0]
    plain = _is_one_of(_PLAIN, call)
    if not plain and (call is node or not _is_one_of(_WITH_STATISTICS, call) or len(call.users) != 1):
        return None
    if plain and call is not node:
        return None
    given = arguments_of(call)
    if given.get("training", False) is not False:
        return Reason.NORM_IN_TRAINING
    mean, variance, weight, bias = (
        Weight.read(module, given.get(name)) for name in ("running_mean", "running_var", "weight", "bias")
    )
    absent = (given.get("weight") is not None and weight is None) or (given.get("bias") is not None and bias is None)
    eps = given.get("eps", 1e-5)
    if mean is None or variance is None or absent or not isinstance(eps, float) or not isinstance(given["input"], Node):
        return Reason.WEIGHT_COMPUTED
    return Norm(
        node=node,
        call=call,
        input=given["input"],
        mean=mean,
        variance=variance,
        weight=weight,
        bias=bias,
        eps=eps,
        rank=None,
    )


def _is_one_of(targets: frozenset[Any], node: Node) -> bool:
    return node.op == "call_function" and table_key(node.target) in targets


def counts_updates(module: GraphModule, norm: Norm) -> bool:
    """Whether it can be told that a norm in training has updated its statistics."""
    beside = {name.rpartition(".")[0]: name for name in norm.mean.sources | norm.variance.sources}
    return all(counter_of(module, name) for name in beside.values())


def asks_only(user: Node) -> bool:
    """Return whether a node reads only what a tensor shares with its normalized form: rank, sizes, dtype and device."""
    if user.op == "call_method":
        return user.target in _METHODS and set(user.all_input_nodes) == {user.args[0]}
    if user.target is getattr:
        return user.args[1] in _ATTRIBUTES
    return user.target is torch.ops.aten.sym_size.int
