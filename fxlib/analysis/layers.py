"""The layers of a graph: linear layers and convolutions, weights that a forward leaves unchanged, ranks of values.

The passes for inference share these facts. `fxlib.analysis.operators` describes single operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.resources import PROCESS, Storage
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.analysis.operators.schemas import OperatorFacts, attribute, is_known
from fxlib.reasons import Reason
from fxlib.runtime.functions import table_key
from fxlib.runtime.guards.folded_weights import RANK, sources_of
from fxlib.runtime.submodules import submodule

LayerKind = Literal["linear", "convolution", "transposed"]
_MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}
FUNCTIONS = {getattr(F, name): name for name in _MODULES.values()}
"""The functions that such modules stand for, and their names."""
_OVERLOADS = re.compile(r"aten::(linear|convolution|conv[123]d|conv_transpose[123]d)$")


@dataclass(frozen=True, slots=True)
class InputRank:
    """As many dimensions as an input of the graph has, if it has at least `least`."""

    input: Node
    """The placeholder of the input."""
    least: int = 0
    """The number of dimensions of whatever is broadcast together with it; with fewer, it would get as many."""


Rank = int | InputRank
"""A number of dimensions, as far as the graph determines it."""

_WEIGHTED = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("linear", "batch_norm"),
    }
)
"""Operators that keep the number of dimensions of their first argument, whatever those of the others are."""
_RANK_PRESERVING = frozenset(
    f"{name}{form}"
    for name in (
        *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu"),
        *("mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softplus", "softmax", "log_softmax", "dropout"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"),
        *("add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv", "neg", "clamp", "cat"),
        *("contiguous", "clone", "detach", "float", "double", "half", "bfloat16"),
    )
    for form in ("", "_")
)
_REDUCING = frozenset({"mean", "sum", "amax", "amin"})
"""Operators that keep the number of dimensions if their third argument says so."""
_RANK_PRESERVING_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "dropout", "instancenorm", "linear", "normalization", "pooling")
)
_STATED: dict[type[nn.Module], int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""Modules that accept tensors of one rank only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLayer:
    """One linear layer or convolution.

    The weight of a convolution is (out, in / groups, *kernel), that of a transposed one (in, out / groups, *kernel).
    """

    node: Node
    input: Node
    kind: LayerKind
    dimensions: int | None
    """Number of the kernel's dimensions; None if the operator accepts any."""
    weight: Weight
    bias: Weight | None
    groups: int
    pads_zeros: bool
    """Whether the layer pads its input with zeros at the borders."""

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        shape = self.weight.tensor.shape
        return int(shape[1]) * self.groups if self.kind == "transposed" else int(shape[0])

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        shape = self.weight.tensor.shape
        return int(shape[0]) if self.kind == "transposed" else int(shape[1]) * self.groups

    @property
    def rank(self) -> int:
        """Number of dimensions of a batched input, the only form in which the second dimension holds the channels."""
        return self.weight.tensor.dim()


def linear_layer_of(module: GraphModule, node: Node) -> LinearLayer | None:
    """Return the linear layer or convolution that a node calls; None if there is none with the module's weights."""
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        return _of_module(node, called) if type(called) in _MODULES and is_known(called) else None
    if node.op != "call_function" or (name := _name(node.target)) is None:
        return None
    return _of_function(module, node, name)


def functional(layer: LinearLayer, module: GraphModule) -> tuple[Any, list[Any]]:
    """Return the function that a module's call stands for, and its arguments after input, weight and bias.

    Args:
        layer: a layer that is called as a module.
        module: the module that the node belongs to.
    """
    called = submodule(module, str(layer.node.target))
    function = getattr(F, _MODULES[type(called)])
    if isinstance(called, _ConvTransposeNd):
        after = [called.stride, called.padding, called.output_padding, called.groups, called.dilation]
    elif isinstance(called, _ConvNd):
        padding = called.padding if called.padding_mode == "zeros" else 0
        after = [called.stride, padding, called.dilation, called.groups]
    else:
        after = []
    return function, after


def _name(target: object) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        found = _OVERLOADS.match(target._schema.name)
        return found[1] if found is not None else None
    return FUNCTIONS.get(table_key(target))


def _of_module(node: Node, layer: Any) -> LinearLayer | None:
    """Transposed convolutions are not taken: a call may pass an `output_size`, which decides the padding."""
    given = (*node.args, *node.kwargs.values())
    if len(given) != 1 or not isinstance(given[0], Node):
        return None
    weight = Weight.held(layer, str(node.target), "weight")
    convolves, transposed = isinstance(layer, _ConvNd), isinstance(layer, _ConvTransposeNd)
    if weight is None:
        return None
    return LinearLayer(
        node=node,
        input=given[0],
        kind="transposed" if transposed else "convolution" if convolves else "linear",
        dimensions=len(layer.kernel_size) if convolves else None,
        weight=weight,
        bias=Weight.held(layer, str(node.target), "bias"),
        groups=layer.groups if convolves else 1,
        pads_zeros=convolves and _pads(layer.padding) and layer.padding_mode == "zeros",
    )


def _of_function(module: GraphModule, node: Node, name: str) -> LinearLayer | None:
    given = arguments_of(node)
    weight, bias = Weight.read(module, given.get("weight")), Weight.read(module, given.get("bias"))
    groups, transposed = given.get("groups", 1), given.get("transposed", "transpose" in name)
    whole = type(groups) is int and type(transposed) is bool and isinstance(given.get("input"), Node)
    if weight is None or not whole or (bias is None and given.get("bias") is not None):
        return None
    return LinearLayer(
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """A parameter or buffer, and the names of everything that its value was computed from (usually itself)."""

    name: str
    tensor: torch.Tensor
    sources: frozenset[str]

    @classmethod
    def held(cls, owner: nn.Module, path: str, name: str) -> Weight | None:
        """Return the weight that the submodule at `path` holds under a name; None if there is none."""
        tensor = owner._parameters.get(name)
        tensor = getattr(owner, name) if tensor is None else tensor
        full = f"{path}.{name}"
        return None if tensor is None else cls(name=full, tensor=tensor, sources=frozenset({full}))

    @classmethod
    def read(cls, module: GraphModule, node: object) -> Weight | None:
        """Return the weight that a `get_attr` node reads; None for any other node."""
        if not isinstance(node, Node) or node.op != "get_attr":
            return None
        tensor = attribute(module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            return None
        return cls(name=str(node.target), tensor=tensor, sources=sources_of(node))


class Steadiness:
    """Answers, for one program, whether a weight at a node still has its value from before the forward."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        """Record what the program writes, and where it first runs code that may write anything."""
        self._effects = effects
        self._written: set[int] = set()
        self._unsure_from = len(effects.nodes)
        for position, (node, does) in enumerate(zip(effects.nodes, effects.per_node, strict=True)):
            if does.fence is Reason.OPAQUE_NEIGHBOUR or PROCESS in does.writes:
                self._unsure_from = min(self._unsure_from, position)
            if does.writes and not _is_idle_norm(module, node):
                self._written |= {each.alias_class for each in does.writes if isinstance(each, Storage)}

    @property
    def written(self) -> set[int]:
        """The alias classes that the program writes."""
        return self._written

    def refusal(self, node: Node, weights: Iterable[torch.Tensor]) -> Reason | None:
        """Return why the node may see other values than before the forward; None if it sees the same."""
        if self._effects.index[node] > self._unsure_from:
            return Reason.OPAQUE_NEIGHBOUR
        written = self._written and not self._written.isdisjoint(self._effects.aliases.of_state(weights))
        return Reason.WEIGHT_WRITTEN if written else None


def under_autocast(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes between the beginning and the end of the program's own blocks of autocast."""
    depth = 0
    for node in nodes:
        depth += node.target is torch.amp.autocast_mode._enter_autocast
        depth -= node.target is torch.amp.autocast_mode._exit_autocast
        if depth:
            yield node


def _is_idle_norm(module: GraphModule, node: Node) -> bool:
    """Return whether the node is a norm that leaves its statistics alone; its flag is a condition of the capture."""
    if node.op != "call_module":
        return False
    called = submodule(module, str(node.target))
    return isinstance(called, _NormBase) and not called.training


def ranks_of(module: GraphModule, effects: Effects) -> dict[Node, Rank]:
    """Return the ranks of all values for which the graph and its effects determine one, in one pass over the graph."""
    found: dict[Node, Rank] = {}
    has_names = type(module.graph._codegen) is CodeGen
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        rank: Rank | None = _noted(node)
        if rank is None and node.op == "placeholder" and has_names:
            rank = InputRank(node)
        elif rank is None and node.op == "get_attr":
            held = attribute(module, str(node.target))
            rank = held.dim() if isinstance(held, torch.Tensor) else None
        elif rank is None and node.op not in ("placeholder", "output"):
            rank = _of_work(module, node, behaviour.operator, found)
        if rank is not None:
            found[node] = rank
    return found


def _noted(node: Node) -> int | None:
    shape = getattr(node.meta.get("val", node.meta.get("tensor_meta")), "shape", None)
    if shape is not None:
        return len(shape)
    return None if node.op == "placeholder" else node.meta.get(RANK)


def _of_work(module: GraphModule, node: Node, operator: OperatorFacts | None, found: dict[Node, Rank]) -> Rank | None:
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        if type(called) is nn.Flatten:
            return 2 if (called.start_dim, called.end_dim) == (1, -1) else None
        keeps = type(called).__module__.startswith(_RANK_PRESERVING_MODULES)
        return _STATED.get(type(called)) or (_shared(node.all_input_nodes, found) if keeps else None)
    name = "" if operator is None else operator.name
    if name == "flatten":
        return 2 if (*node.args[1:], *node.kwargs.values()) == (1,) else None
    if name in ("view", "reshape"):
        sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return len(sizes) if len(sizes) > 1 else None
    if name in _REDUCING:
        keeps_dimension = (
            node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", node.kwargs.get("keepdims", False))
        )
        return _shared(node.all_input_nodes, found) if keeps_dimension is True else None
    if name in _WEIGHTED:
        return _shared([each for each in (arguments_of(node).get("input"),) if isinstance(each, Node)], found)
    return _shared(node.all_input_nodes, found) if name in _RANK_PRESERVING else None


def _shared(values: Iterable[Node], found: dict[Node, Rank]) -> Rank | None:
    """Return the rank of values that are broadcast together; None if the graph does not determine it."""
    ranks = [found.get(each) for each in values]
    known = [each for each in ranks if each is not None]
    if not known or len(known) < len(ranks):
        return None
    least = max(each if isinstance(each, int) else each.least for each in known)
    inputs = {each.input for each in known if isinstance(each, InputRank)}
    if len(inputs) > 1:
        return None
    return InputRank(inputs.pop(), least) if inputs else least


def only_user(node: Node) -> Node | None:
    """Return the only node that uses a value; None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


_ACTIVATION_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Hardtanh: "hardtanh",
    nn.Hardswish: "hardswish",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.GELU: "gelu",
}
_FORMS = ("approximate", "min_val", "max_val")
"""Attributes of such modules that tell one form from another."""
_ACTIVATION_METHODS = {"relu": "relu", "relu_": "relu", "tanh": "tanh", "tanh_": "tanh"}
_ACTIVATION_FUNCTIONS = {
    **{
        getattr(place, name): name.rstrip("_")
        for place, names in (
            (F, ("relu", "relu_", "relu6", "hardtanh", "hardtanh_", "hardswish", "silu", "tanh", "gelu")),
            (torch, ("relu", "relu_", "tanh", "tanh_")),
        )
        for name in names
    },
    **{
        getattr(torch.ops.aten, name).default: name.rstrip("_")
        for each in ("relu", "relu6", "hardtanh", "hardswish", "silu", "tanh", "gelu")
        for name in (each, f"{each}_")
    },
}


def activation_of(module: GraphModule, node: Node) -> str | None:
    """Return which activation a node is, in place or not; None if it is none that is known here.

    Those known are relu, relu6, hardswish, silu, tanh, gelu, and gelu_tanh, its approximation by a hyperbolic tangent.
    """
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        name = _ACTIVATION_MODULES.get(type(called)) if is_known(called) else None
        given: dict[str, Any] = {each: vars(called)[each] for each in _FORMS if each in vars(called)}
    elif node.op == "call_method":
        name, given = _ACTIVATION_METHODS.get(str(node.target)), {}
    else:
        name = _ACTIVATION_FUNCTIONS.get(table_key(node.target)) if node.op == "call_function" else None
        given = {} if name is None else arguments_of(node)
    if name == "hardtanh":
        return "relu6" if (given.get("min_val", -1.0), given.get("max_val", 1.0)) == (0.0, 6.0) else None
    if name == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(given.get("approximate", "none"))
    return name


def is_relu(module: GraphModule, node: Node) -> bool:
    """Return whether a node is a ReLU, in place or not."""
    return activation_of(module, node) == "relu"
