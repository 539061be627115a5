"""Contracts that need no declaration: of torch functions, and of the forwards of `torch.nn` modules behind RRefs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.rnn import RNNBase

from fxlib.spec.contract import PURE, Contract

PARAMETERS = "parameters"
"""The resource that a module's forward reads: its parameters and buffers."""

GENERATOR = "generator"
"""The resource that random functions write: the state of the server's random generator."""

MODULE_READ = Contract(reads=frozenset({PARAMETERS}))
RANDOM = Contract(writes=frozenset({GENERATOR}))

# The forwards of these modules draw random numbers or update buffers in training mode, or the modules that they contain
# may do so. The mode of a module on another machine is not known, and may change unnoticed.
_NOT_READS: tuple[type, ...] = (
    *(_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, RNNBase),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder),
    *(nn.TransformerDecoderLayer, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    *(LazyModuleMixin, nn.AdaptiveLogSoftmaxWithLoss),
)
_RANDOM_FUNCTIONS = frozenset(
    {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
    | {"rrelu", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "bernoulli", "multinomial"}
    | {"normal", "poisson", "binomial", "rand", "randn", "randint", "randperm"}
    | {"fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "multi_head_attention_forward"}
    | {"rand_like", "randn_like", "randint_like", "scaled_dot_product_attention"}
)
# Whether these functions update running statistics or drop elements depends on their arguments.
_DEPENDS = frozenset({"batch_norm", "instance_norm", "lstm", "gru", "rnn_tanh", "rnn_relu", "embedding_renorm"})
_PURE_OPERATORS = frozenset(
    {
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "abs", "invert", "index"),
        *("and_", "or_", "xor", "not_", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge", "is_", "is_not"),
        *("getitem", "contains", "countOf", "indexOf", "truth", "concat", "length_hint"),
    }
)
_PURE_BUILTINS = frozenset(
    {
        *("abs", "bool", "bytes", "chr", "complex", "dict", "divmod", "float", "frozenset", "int", "len", "list"),
        *("max", "min", "ord", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum"),
        *("tuple", "zip"),
    }
)
"""Others run code of the program's own, or reach objects of the server by name, as `getattr` of a class does."""
_CASTS = frozenset({"bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short"})


def of_function(name: str, kwargs: Mapping[str, object]) -> Contract | None:
    """Return the contract of a function of `torch`, `operator` or `builtins`, given its name "module:qualname"."""
    module, _, qualname = name.partition(":")
    if any(map(callable, kwargs.values())):  # the key of `sorted`, the distance of a loss
        return None
    if module == "_operator":
        return PURE if qualname in _PURE_OPERATORS else None
    if module == "builtins":
        return PURE if qualname in _PURE_BUILTINS else None
    if module not in ("torch", "torch.nn.functional") or kwargs.get("out") is not None or kwargs.get("inplace"):
        return None
    operator_name = qualname.removeprefix("Tensor.")
    if operator_name in _RANDOM_FUNCTIONS:
        return RANDOM
    if operator_name.endswith("_") or operator_name in _DEPENDS:
        return None
    if module == "torch.nn.functional" or operator_name in _CASTS:
        return PURE
    return _of_operator(operator_name)


def of_method(cls: type, method: str) -> Contract | None:
    """Return the contract of a method of a `torch.nn` module or a tensor behind an RRef."""
    if cls is torch.Tensor or cls is nn.Parameter:
        return None  # the tensor behind the RRef is state, and its writers are not known
    is_own = cls.__module__.startswith("torch.nn.modules.") and issubclass(cls, nn.Module)
    if not is_own or method not in ("forward", "__call__") or issubclass(cls, _NOT_READS):
        return None
    if issubclass(cls, _NormBase):  # batch norm, and instance norm, which may track statistics
        return None
    return PURE if cls.__module__ == "torch.nn.modules.loss" else MODULE_READ


@functools.cache
def _of_operator(name: str) -> Contract | None:
    """Return a pure contract if, by torch's own schemas, no overload writes its arguments or draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    overloads = [getattr(packet, each) for each in packet.overloads()]
    functional = [each for each in overloads if not any(argument.is_out for argument in each._schema.arguments)]
    if any(torch.Tag.nondeterministic_seeded in each.tags for each in functional):
        return RANDOM
    return PURE if functional and not any(each._schema.is_mutable for each in functional) else None
