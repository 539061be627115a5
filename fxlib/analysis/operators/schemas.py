"""The facts about each operator that torch publishes, from its schema and from `operator_tables.py`.

Schemas say which arguments an operator writes, whether its result is a view of them, and whether it draws random
numbers. They say nothing about composite operators (`einsum` may return a view without saying so), which are assumed to
return their arguments unless they are listed. Operators that torch does not publish are unknown.

The same facts are known for calls of leaf modules of `torch.nn`. Training flags do not count, since they may be set at
any time: a dropout may draw, and a batch norm may update its statistics. A module is unknown if torch did not write it,
it has hooks (its own, or those of all modules), or its forward was replaced.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

from fxlib.analysis.operators import operator_tables as words
from fxlib.runtime import int8
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.functions import table_key
from fxlib.runtime.ops.registry import Role, functions_with
from fxlib.runtime.submodules import all_have_hooks, is_torchs_value, submodule

_FRESH = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "instancenorm", "linear", "loss", "normalization", "pooling", "rnn")
)
"""Parts of torch.nn whose modules return memory of their own (except `Identity`, and modules set to work in place)."""

_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorFacts:
    """One operator. Arguments are named by position or keyword."""

    name: str
    shares: bool = False
    """Whether the result may share memory with an argument."""
    shared: frozenset[int | str] | None = None
    """The arguments with which the result may share memory; None if that may be any of them."""
    same: bool = False
    """Whether the result may be an argument itself, including its autograd history, and not only a view of it."""
    writes: frozenset[int | str] = frozenset()
    """Arguments whose memory the operator writes."""
    random: bool = False
    raises: bool = False
    """Whether it may raise depending on values, as an assertion does."""
    gradient: bool = True
    """Whether the result can take a gradient from an argument."""
    state: tuple[torch.Tensor, ...] = ()
    """Parameters and buffers of its own that a module reads."""
    written_state: tuple[torch.Tensor, ...] = ()
    """The tensors among these that the module writes."""
    reduces: bool = False
    """Whether its backward reduces gradients over the ranks of a process group."""
    joins: bool = False
    """Whether it also communicates with these ranks in its forward."""

    @property
    def has_effects(self) -> bool:
        """Whether it does anything besides computing its result."""
        return bool(self.writes or self.random or self.raises or self.written_state or self.reduces)


def facts_of(target: object) -> OperatorFacts | None:
    """Return what a function, a method by name, or an overload does if no argument changes it; None if unknown."""
    return _method(target) if isinstance(target, str) else _function(target)


@functools.cache
def makes_container(target: object) -> bool:
    """Return whether a function, a method by name, or an overload returns a tuple, list or dict, whatever it gets."""
    if target in (tuple, list, dict, OrderedDict):
        return True
    found = facts_of(target)
    schemas = () if found is None else _schemas(found.name)
    results = [each.returns for each in schemas if each.arguments and "Tensor" in str(each.arguments[0].type)]
    return bool(results) and all(
        len(each) > 1 or any(isinstance(result.type, torch.ListType) for result in each) for each in results
    )


@functools.cache
def flags_of(target: object) -> dict[str, int]:
    """Return the positions at which an operator takes arguments that change what it does."""
    if target in (getattr, read_attribute, operator.getitem):
        return {"index": 1}
    if isinstance(target, str) or not callable(target):
        return {}
    if isinstance(target, torch._ops.OpOverload):
        names = [argument.name for argument in target._schema.arguments]
        return {name: position for position, name in enumerate(names) if name in words.FLAGS}
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema has them
        schemas = _schemas(getattr(target, "__name__", ""))
        names = [argument.name for argument in schemas[0].arguments] if schemas else []
    return {name: position for position, name in enumerate(names) if name in words.FLAGS}


@functools.cache
def _function(target: object) -> OperatorFacts | None:
    if isinstance(target, torch._ops.OpOverload):
        return _overload(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _torch(target.__name__) if str(target).startswith("aten.") else None
    if (name := _python_names().get(table_key(target))) is not None:
        return _python(name)
    name = _torch_names().get(table_key(target))
    return None if name is None else _torch(name)


@functools.cache
def _method(name: str) -> OperatorFacts | None:
    if name in words.RREF_METHODS:
        return OperatorFacts(name=name, gradient=False)
    return _torch(name) if name in _tensor_methods() else None


def _python(name: str) -> OperatorFacts:
    if name in words.PYTHON_IN_PLACE:
        return OperatorFacts(name=name, writes=frozenset({0}), shares=True, same=True, raises=name in words.RAISING)
    shares = name in words.PYTHON_SHARING
    raises, gradient = name in words.RAISING, name not in words.PYTHON_NO_GRADIENT
    return OperatorFacts(name=name, shares=shares, same=shares, raises=raises, gradient=gradient)


@functools.cache
def _torch(name: str) -> OperatorFacts | None:
    """Return an operator by the name under which torch publishes it: function, method or `aten` operator."""
    if name in words.UNKNOWN:
        return None
    schemas = [schema for schema in _schemas(name) if not _takes_out(schema)]
    writes = _writes(name, schemas)
    view = bool(writes) or any(result.alias_info for schema in schemas for result in schema.returns)
    trusted = _is_functional(schemas) and name not in words.RETURN_ARGUMENT
    shares = name not in words.FRESH and (view or not trusted)
    return OperatorFacts(
        name=name,
        shares=shares,
        same=shares and name not in words.NEW_VIEW,
        writes=writes,
        random=name in words.RANDOM or _is_seeded(name),
        raises=name in words.RAISING,
        gradient=name not in words.NO_GRADIENT,
    )


@functools.cache
def _overload(target: torch._ops.OpOverload[..., Any]) -> OperatorFacts | None:
    if target.namespace not in {"aten", "prims", int8.NAMESPACE}:
        return None  # a custom operator: its schema describes its arguments, but no side effects
    schema, name = target._schema, target._schema.name.split("::")[1]
    if name in words.UNKNOWN:
        return None
    writes = frozenset(_written(schema))
    silent = name in words.UNSAFE_VIEWS or (_is_composite(target.name()) and name not in words.FRESH)
    shares = silent or any(result.alias_info for result in schema.returns)
    return OperatorFacts(
        name=name,
        shares=shares,
        shared=None if silent else frozenset(_annotated(schema)),
        same=shares and name not in words.NEW_VIEW,
        writes=writes | _writes_by_name(name),
        random=torch.Tag.nondeterministic_seeded in target.tags or name in words.RANDOM,
        raises=name in words.RAISING,
        gradient=name not in words.NO_GRADIENT and target.namespace != int8.NAMESPACE,
    )


def _writes(name: str, schemas: Iterable[torch._C.FunctionSchema]) -> frozenset[int | str]:
    found: set[int | str] = set(_writes_by_name(name))
    for schema in schemas:
        found |= set(_written(schema))
    return frozenset(found)


def _writes_by_name(name: str) -> frozenset[int | str]:
    if name in words.RUNNING_STATISTICS:
        return words.STATISTICS
    in_place = name in words.IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    return frozenset({0, "input", "self"}) if in_place else frozenset()


def _written(schema: torch._C.FunctionSchema) -> Iterator[int | str]:
    return _annotated(schema, written=True)


def _annotated(schema: torch._C.FunctionSchema, *, written: bool = False) -> Iterator[int | str]:
    """Yield the arguments that a result may share, or those that are written, by position and by name."""
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not written):
            yield argument.name
            if not argument.kwarg_only:
                yield position


def _takes_out(schema: torch._C.FunctionSchema) -> bool:
    """Return whether it is the overload with `out=`, which `_as_called` accounts for."""
    return any(each.kwarg_only and each.alias_info and each.alias_info.is_write for each in schema.arguments)


def _is_functional(schemas: Iterable[torch._C.FunctionSchema]) -> bool:
    """Return whether every overload has a kernel of its own, whose schema is reliable on what the result shares."""
    qualified = [f"{each.name}.{each.overload_name}" if each.overload_name else each.name for each in schemas]
    return bool(qualified) and not any(_is_composite(each) for each in qualified)


@functools.cache
def _is_composite(qualified: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
    except RuntimeError:
        return False  # only TorchScript knows it: it involves no tensors


@functools.cache
def _schemas(name: str) -> tuple[torch._C.FunctionSchema, ...]:
    return tuple(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _is_seeded(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in overloads)


@functools.cache
def _tensor_methods() -> frozenset[str]:
    published = {getattr(each, "__name__", "") for each in torch.overrides.get_overridable_functions()[torch.Tensor]}
    schemed = {name for name in dir(torch.Tensor) if not name.startswith("__") and _schemas(name)}
    return frozenset(published | schemed | words.METHODS) - words.UNKNOWN


@functools.cache
def _torch_names() -> dict[object, str]:
    """Return the functions that torch publishes, by identity; the last of several modules to publish one names it."""
    table: dict[object, str] = {}
    published = torch.overrides.get_overridable_functions()
    for module, prefix in ((torch.linalg, "linalg_"), (torch.fft, "fft_"), (torch.special, "special_")):
        for function in published[module]:
            table[table_key(function)] = prefix + function.__name__.removeprefix(prefix)
    for module in (torch, torch.functional, F):
        names = {getattr(function, "__name__", "") for function in published[module]} | set(words.CONSTRUCTORS)
        names |= {name for name in dir(module) if not name.startswith("_") and _schemas(name)}
        table |= {table_key(getattr(module, name)): name for name in names if callable(getattr(module, name, None))}
    for function in published[torch.Tensor]:
        table.setdefault(table_key(function), getattr(function, "__name__", ""))
    table |= {torch._assert: "_assert", torch._weight_norm: "_weight_norm"}
    return table


@functools.cache
def _python_names() -> dict[object, str]:
    table: dict[object, str] = {getattr(operator, name): name for name in words.OPERATORS}
    table |= {getattr(builtins, name): name for name in words.BUILTINS}
    table |= {
        OrderedDict: "dict",
        read_attribute: "getattr",
        **dict.fromkeys(functions_with(Role.LOOKUP), "resolve"),
        **dict.fromkeys(functions_with(Role.CHECK), "check_structure"),
        rpc.get_worker_info: "get_worker_info",
    }  # look up a name
    return table | {function: "math" for name, function in vars(math).items() if callable(function)}


def module_operator(module: nn.Module) -> OperatorFacts | None:
    """Return what calling the module does; None if it may do anything."""
    if not is_known(module):
        return None
    parts = _parts(module)
    in_place = any(map(_works_in_place, parts))
    shares = in_place or any(map(_is_empty, parts)) or not all(map(_is_fresh, map(type, parts)))
    return OperatorFacts(
        name=type(module).__name__,
        shares=shares,
        same=shares,
        writes=frozenset({0, "input"}) if in_place else frozenset(),
        random=any(map(_draws, parts)),
        raises=any(map(_checks_values, parts)),
        state=tuple(chain.from_iterable(map(_tensors, parts))),
        written_state=tuple(chain.from_iterable(map(_written_by, parts))),
    )


def is_known(module: nn.Module) -> bool:
    """Return whether it is known what calling the module does."""
    return not all_have_hooks() and all(map(_is_plain, _parts(module)))


def attribute(module: nn.Module, target: str) -> object:
    """Return the object that a `get_attr` node names."""
    path, _, name = target.rpartition(".")
    return getattr(submodule(module, path) if path else module, name)


def _parts(module: nn.Module) -> list[nn.Module]:
    return list(module.modules()) if module._modules else [module]


def _is_plain(module: nn.Module) -> bool:
    held, kind = vars(module), cast("type", type(module))
    own_code = not all(map(is_torchs_value, held.values()))  # an activation, or the distance of a loss
    return _is_torchs(kind) and "forward" not in held and not own_code and not any(_hooks(held))


def _works_in_place(module: nn.Module) -> bool:
    return bool(vars(module).get("inplace"))


@functools.cache
def _is_torchs(kind: type) -> bool:
    lazy = issubclass(kind, (nn.modules.lazy.LazyModuleMixin, nn.SyncBatchNorm))
    return kind.__module__.startswith("torch.nn.modules.") and not lazy


@functools.cache
def _is_fresh(kind: type) -> bool:
    if issubclass(kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return True
    return kind.__module__ in (*_FRESH, "torch.nn.modules.sparse") and not issubclass(kind, nn.Identity)


def _is_empty(module: nn.Module) -> bool:
    """Return whether a module is a container of nothing, which returns its argument."""
    return isinstance(module, nn.Sequential) and not module._modules


def _draws(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, _DRAWS)


def _checks_values(module: nn.Module) -> bool:
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return looks_up or isinstance(module, nn.modules.loss._Loss)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]


def _written_by(module: nn.Module) -> list[torch.Tensor]:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return [each for each in module._buffers.values() if each is not None]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return [module.weight]
    return []
