"""Linear layers and convolutions whose weights a module holds, in whichever form they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fxlib.analysis.layers.constant_weights import Weight
from fxlib.analysis.operators.leaf_modules import is_known
from fxlib.analysis.operators.signatures import arguments_of
from fxlib.runtime.submodules import submodule

Kind = Literal["linear", "convolution", "transposed"]
_MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}
_FUNCTIONS = {getattr(F, name): name for name in _MODULES.values()}
_OVERLOADS = re.compile(r"aten::(linear|convolution|conv[123]d|conv_transpose[123]d)$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Affine:
    """One linear layer or convolution.

    The weight of a convolution is (out, in / groups, *kernel), that of a transposed one (in, out / groups, *kernel).
    """

    node: Node
    input: Node
    kind: Kind
    dimensions: int | None
    """Number of the kernel's dimensions; None where the operator takes any."""
    weight: Weight
    bias: Weight | None
    groups: int
    pads_zeros: bool
    """Whether what it multiplies with its weights is, at the borders, zero instead of its input."""

    @property
    def outputs(self) -> int:
        """Number of channels of its result."""
        shape = self.weight.tensor.shape
        return int(shape[1]) * self.groups if self.kind == "transposed" else int(shape[0])

    @property
    def inputs(self) -> int:
        """Number of channels that it takes."""
        shape = self.weight.tensor.shape
        return int(shape[0]) if self.kind == "transposed" else int(shape[1]) * self.groups

    @property
    def rank(self) -> int:
        """Number of dimensions of a batch, the only form in which channels are the second."""
        return self.weight.tensor.dim()


def affine_of(module: GraphModule, node: Node) -> Affine | None:
    """Return what a node is as a linear layer or convolution; None if it is none, or not by weights of the module's."""
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        return _of_module(node, called) if type(called) in _MODULES and is_known(called) else None
    if node.op != "call_function" or (name := _name(node.target)) is None:
        return None
    return _of_function(module, node, name)


def functional(affine: Affine, module: GraphModule) -> tuple[Any, list[Any]]:
    """Return the function that a module's call stands for, and what it takes after input, weight and bias.

    Args:
        affine: a call of a module.
        module: that the node belongs to.
    """
    layer = submodule(module, str(affine.node.target))
    function = getattr(F, _MODULES[type(layer)])
    if isinstance(layer, _ConvTransposeNd):
        after = [layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation]
    elif isinstance(layer, _ConvNd):
        padding = layer.padding if layer.padding_mode == "zeros" else 0
        after = [layer.stride, padding, layer.dilation, layer.groups]
    else:
        after = []
    return function, after


def _name(target: object) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        found = _OVERLOADS.match(target._schema.name)
        return found[1] if found is not None else None
    try:
        return _FUNCTIONS.get(target)
    except TypeError:  # not hashable
        return None


def _of_module(node: Node, layer: Any) -> Affine | None:
    """A transposed convolution may be called with an `output_size`, which decides its padding: not taken."""
    given = (*node.args, *node.kwargs.values())
    if len(given) != 1 or not isinstance(given[0], Node):
        return None
    weight = Weight.held(layer, str(node.target), "weight")
    convolves, transposed = isinstance(layer, _ConvNd), isinstance(layer, _ConvTransposeNd)
    if weight is None:
        return None
    return Affine(
        node=node,
        input=given[0],
        kind="transposed" if transposed else "convolution" if convolves else "linear",
        dimensions=len(layer.kernel_size) if convolves else None,
        weight=weight,
        bias=Weight.held(layer, str(node.target), "bias"),
        groups=layer.groups if convolves else 1,
        pads_zeros=convolves and _pads(layer.padding) and layer.padding_mode == "zeros",
    )


def _of_function(module: GraphModule, node: Node, name: str) -> Affine | None:
    given = arguments_of(node)
    weight, bias = Weight.read(module, given.get("weight")), Weight.read(module, given.get("bias"))
    groups, transposed = given.get("groups", 1), given.get("transposed", "transpose" in name)
    whole = type(groups) is int and type(transposed) is bool and isinstance(given.get("input"), Node)
    if weight is None or not whole or (bias is None and given.get("bias") is not None):
        return None
    return Affine(
        node=node,
        input=given["input"],
        kind="linear" if name == "linear" else "transposed" if transposed else "convolution",
        dimensions=None if name == "linear" else weight.tensor.dim() - 2,
        weight=weight,
        bias=bias,
        groups=groups,
        pads_zeros=name != "linear" and _pads(given.get("padding", 0)),
    )


def _pads(padding: object) -> bool:
    if isinstance(padding, str):
        return padding != "valid"
    return any(each != 0 for each in (padding if isinstance(padding, (tuple, list)) else (padding,)))
