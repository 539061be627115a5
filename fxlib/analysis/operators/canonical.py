"""A node's operator and operands, in one canonical form for all ways of writing the call.

`x.relu()`, `torch.relu(x)`, `F.relu(x)`, `nn.ReLU()(x)` and `aten.relu.default(x)` are one operator on one operand, and
so are `x + y`, `torch.add(x, y)` and `torch.add(input=x, other=y, alpha=1)`. Operators are the same if they have the
same name and the same parameter names; an operator that torch does not publish is the same only as itself.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.arguments import OverloadParameter, OverloadSignature, overload_of, overloads
from fxlib.analysis.operators.schemas import facts_of, module_operator

_ARITHMETIC: dict[object, str] = {
    getattr(operator, name): published
    for name, published in (
        *((name, name) for name in ("add", "sub", "mul", "matmul", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")),
        *(("truediv", "div"), ("and_", "bitwise_and"), ("or_", "bitwise_or"), ("xor", "bitwise_xor")),
        *(("invert", "bitwise_not"), ("abs", "abs")),
    )
}
"""Python's operators, by the names that torch has for them on tensors."""
_SPELLINGS = {"input": "self", "axis": "dim", "keepdims": "keepdim", "x": "self", "x2": "other"}
_UNSEEN = frozenset({"_stacklevel"})
_LITERALS: dict[str, tuple[type, ...]] = {
    "int": (int, torch.dtype, torch.layout, torch.memory_format),
    "Device": (torch.device, str),
    "float": (int, float),
    "number": (int, float, complex),
    "str": (str,),
    "bool": (bool,),
}
_IN_PLACE = ("inplace",)
_MODULES: dict[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{
        kind: (function, _IN_PLACE)
        for kind, function in (
            *((nn.ReLU, F.relu), (nn.ReLU6, F.relu6), (nn.SiLU, F.silu), (nn.Mish, F.mish), (nn.SELU, F.selu)),
            *((nn.Hardswish, F.hardswish), (nn.Hardsigmoid, F.hardsigmoid)),
        )
    },
    nn.GELU: (F.gelu, ("approximate",)),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.LogSigmoid: (F.logsigmoid, ()),
    nn.Softsign: (F.softsign, ()),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope", "inplace")),
    nn.ELU: (F.elu, ("alpha", "inplace")),
    nn.Hardtanh: (F.hardtanh, ("min_val", "max_val", "inplace")),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
    nn.Softmax: (F.softmax, ("dim",)),
    nn.LogSoftmax: (F.log_softmax, ("dim",)),
    nn.GLU: (F.glu, ("dim",)),
    nn.Flatten: (torch.flatten, ("start_dim", "end_dim")),
}
"""Modules without weights, as functions of their input and some of their attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One call. `operands` are the values of the parameters in `names`, defaults included."""

    operator: Hashable
    names: tuple[str, ...]
    operands: tuple[Any, ...]

    @property
    def key(self) -> Hashable:
        """The key that calls of the same operator share."""
        return self.operator, self.names

    @property
    def commutes(self) -> bool:
        """Whether the first two operands may be swapped with the same bits."""
        unscaled = self.operands[2:] in ((), (1,))
        return self.operator in words.COMMUTATIVE and self.names[:2] == ("self", "other") and unscaled


class Forms:
    """The forms of the nodes of one module."""

    def __init__(self, module: GraphModule, joined: Container[Node] = ()) -> None:
        """Find the values that are not tensors, in one pass over the graph; `joined` are nodes that join containers."""
        self._module, self._joined = module, joined
        self._plain: set[Node] = set()
        for node in module.graph.nodes:
            if _is_plain(node, self._plain):
                self._plain.add(node)

    def of(self, node: Node) -> Form | None:
        """Return the form of a node; None if it calls nothing, or it is unknown how it takes its arguments."""
        if node.op == "call_module":
            written = as_function(self._module, node)
            return None if written is None else form_of(*written)
        if node.op not in ("call_function", "call_method"):
            return None
        on_others = node in self._joined or any(value in self._plain for value in node.all_input_nodes)
        if node.target in _ARITHMETIC and on_others:
            return _itself(node.target, node.args, node.kwargs)
        return form_of(node.target, node.args, node.kwargs, self._plain)


Written = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function or the name of a method, its positional arguments, and its keyword arguments."""


def as_function(module: GraphModule, node: Node) -> Written | None:
    """Return the function that the call of a module without weights stands for; None if there is none."""
    called = module.get_submodule(str(node.target))
    if type(called) not in _MODULES or module_operator(called) is None:
        return None
    function, names = _MODULES[type(called)]
    given = (*node.args, *node.kwargs.values())
    if len(given) != 1:
        return None
    return function, given, {name: getattr(called, name) for name in names}


def form_of(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Container[Node] = frozenset()
) -> Form | None:
    """Return the form of a call; None if no overload of the operator accepts such arguments.

    Args:
        target: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        plain: nodes that are known to be no tensors; other nodes may be anything.
    """
    if target in _ARITHMETIC:
        if kwargs or any(isinstance(each, (tuple, list, str)) for each in args):
            return _itself(target, args, kwargs)
        name = _ARITHMETIC[target]
        form = _by_schema(name, args, {}, plain)
        if form is None and name in words.COMMUTATIVE:  # 1 + x
            form = _by_schema(name, args[::-1], {}, plain)
        return form or _itself(target, args, {})
    if kwargs.get("out") is not None:
        return _itself(target, args, kwargs)
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace != "aten":
            return _itself(target, args, kwargs)
        overload = overload_of(target)
        form = _bound(overload, args, kwargs, plain)
        if form is None and any(type(each) in _LITERALS["number"] for each in (*args, *kwargs.values())):
            # torch.export writes x * 2 as aten.mul.Tensor(x, 2): torch wraps the number, as aten.mul.Scalar does.
            form = _by_schema(overload.operator, args, kwargs, plain)
        return form
    function = getattr(torch.Tensor, target, None) if isinstance(target, str) else target
    found = facts_of(target)
    if found is None or not _is_torchs(function):
        return _itself(target, args, kwargs)
    if (parameters := _signature(function)) is not None:
        return _by_signature(found.name, parameters, args, kwargs)
    return _by_schema(found.name, args, kwargs, plain) if overloads(found.name) else _itself(target, args, kwargs)


def _itself(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    names = tuple(sorted(kwargs))
    key = target if isinstance(target, str) else id(target)
    return Form(operator=("itself", key, len(args)), names=names, operands=(*args, *(kwargs[each] for each in names)))


def _is_torchs(function: object) -> bool:
    return str(getattr(function, "__module__", None) or "torch").startswith("torch")


@functools.cache
def _signature(function: Any) -> tuple[inspect.Parameter, ...] | None:
    if not inspect.isfunction(function):
        return None
    found = tuple(inspect.signature(function).parameters.values())
    plain = bool(found) and all(each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in found)
    return found if plain else None


def _by_signature(
    name: str, parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Form | None:
    names = [each.name for each in parameters]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > len(names) or not given.keys() <= set(names):
        return None
    given = {each.name: each.default for each in parameters if each.default is not each.empty} | given
    if not all(each in given for each in names) or isinstance(given[names[0]], (bool, int, float)):
        return None
    kept = [each for each in names if each not in _UNSEEN and not (each == "inplace" and given[each] is False)]
    spelled = tuple(_SPELLINGS.get(each, each) if position == 0 else each for position, each in enumerate(kept))
    return Form(operator=name, names=spelled, operands=tuple(_settled(given[each]) for each in kept))


def _by_schema(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Container[Node]) -> Form | None:
    """Bind the arguments to the overload with the fewest parameters that accepts them."""
    fitting = (form for each in overloads(name) if (form := _bound(each, args, kwargs, plain)) is not None)
    return next(fitting, None)


def _bound(
    overload: OverloadSignature, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Container[Node]
) -> Form | None:
    names = overload.names
    if len(args) > overload.positional == 2 and overload.parameters[1].listed:  # x.view(2, 3)
        args = (args[0], tuple(args[1:]))
    if len(args) > overload.positional:
        return None
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        given[name if name in names else _SPELLINGS.get(name, name)] = value
    if len(given) != len(args) + len(kwargs) or not given.keys() <= set(names):
        return None
    operands = []
    for each in overload.parameters:
        if each.name not in given and each.required:
            return None
        value = given.get(each.name, each.default)
        if each.name in given and not _takes(each, value, plain):
            return None
        operands.append(_settled((value,) * each.number if each.number and type(value) is int else value))
    first = _SPELLINGS.get(names[0], names[0])
    return Form(operator=overload.operator, names=(first, *names[1:]), operands=tuple(operands))


def _takes(parameter: OverloadParameter, value: Any, plain: Container[Node]) -> bool:
    """Return whether a value, a node or a literal, may be passed for a parameter."""
    if value is None:
        return parameter.optional
    if isinstance(value, Node):
        return parameter.kind not in (("str", "bool", "Tensor") if value in plain else ("str", "bool"))
    if parameter.kind == "Tensor":
        return False
    if parameter.listed:
        return isinstance(value, (tuple, list)) or (bool(parameter.number) and type(value) is int)
    allowed = _LITERALS.get(parameter.kind)
    return allowed is None or type(value) in allowed


def _settled(value: Any) -> Any:
    """Convert lists to tuples, which are the same to torch."""
    return tuple(map(_settled, value)) if isinstance(value, (tuple, list)) else value


_PLAIN_METHODS = (
    words.QUERIES
    | {"item", "tolist", "storage_offset", "element_size", "get_device", "data_ptr", "dense_dim", "sparse_dim"}
    | {"is_contiguous", "is_signed", "is_pinned", "is_inference", "is_conj", "is_neg", "is_same_size", "is_set_to"}
    | {"is_shared", "is_nonzero", "is_coalesced", "equal", "allclose", "has_names", "q_scale", "q_zero_point"}
)
_PLAIN_ATTRIBUTES = words.PLAIN_ATTRIBUTES | {"_version", "is_mkldnn", "is_mps", "is_sparse_csr", "is_xpu"}
_PLAIN_BUILTINS: frozenset[object] = frozenset({len, int, float, bool, str, isinstance, round, divmod, range})


def _is_plain(node: Node, plain: Container[Node]) -> bool:
    """Return whether a node's value is certainly not a tensor: a size, a number, a string."""
    if "val" in node.meta:
        return not isinstance(node.meta["val"], (torch.Tensor, tuple, list))
    if node.op == "placeholder":
        return isinstance(node.type, type) and issubclass(node.type, (int, float, str, list, tuple))
    if node.op == "call_method":
        return node.target in _PLAIN_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _PLAIN_ATTRIBUTES
    found = facts_of(node.target)
    if node.target in _PLAIN_BUILTINS or (found is not None and found.name == "math"):
        return True
    inputs = node.all_input_nodes
    python = getattr(node.target, "__module__", None) in ("_operator", "builtins")
    return python and bool(inputs) and all(value in plain for value in inputs)
