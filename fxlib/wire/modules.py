"""Modules on the wire: torch's own classes, modules wrapped for data parallelism, and the names of parts.

A module of torch is rebuilt from its attributes, without its constructor. No part may have a name that hides what the
module's class needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fxlib.runtime import CapturedModule
from fxlib.runtime.data_parallel import HOOKS, DataParallel, DataParallelOptions
from fxlib.runtime.submodules import all_have_hooks
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault, Limits
from fxlib.wire.memory_safety import reached_outside
from fxlib.wire.names import check_atom, check_comment, check_label, is_dunder
from fxlib.wire.opaque import OpaqueModule

_OWN_STATE = frozenset(vars(nn.Module()))
"""Attributes in which nn.Module keeps parameters, children, hooks and flags."""
_OF_ANY_MODULE = _OWN_STATE | frozenset(dir(nn.Module))
_HOOKS = tuple(sorted(name for name in _OWN_STATE if name.endswith("hooks")))
_RNN_CACHES = frozenset({"_flat_weights", "_flat_weight_refs"})
_CALLS = frozenset({("TransformerEncoderLayer", "activation"), ("TransformerDecoderLayer", "activation")})
_ACTIVATIONS = frozenset(
    f"{namespace}.{name}"
    for namespace in ("torch", "torch.nn.functional")
    for name in (
        *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu"),
        *("relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh"),
    )
)
_RNN_NAMES = ("_flat_weights_names", "_all_weights")

_FIELDS = tuple(asdict(DataParallelOptions()))


@cache
def classes() -> Mapping[str, type[nn.Module]]:
    """Return classes of torch.nn by name that stay inside of their tensors whatever their attributes are."""
    return {name: cls for name, cls in candidates().items() if not reached_outside(f"torch.nn.modules.{name}")}


@cache
def candidates() -> Mapping[str, type[nn.Module]]:
    """Return classes of torch.nn by name, without those that choose their own class when they first run."""
    found = [cls for cls in vars(nn).values() if isinstance(cls, type) and issubclass(cls, nn.Module)]
    return {
        cls.__name__: cls
        for cls in [*found, NonDynamicallyQuantizableLinear]
        if cls.__module__.startswith("torch.nn.modules.") and getattr(cls, "cls_to_become", None) is None
    }


def class_name(module: nn.Module) -> str | None:
    """Return the name of a module's class, or None if the class is not on the list or the module carries hooks."""
    name = type(module).__name__
    return name if classes().get(name) is type(module) and not has_hooks(module) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling or saving the module runs code that is not its class's."""
    return all_have_hooks() or any(vars(module).get(name) for name in _HOOKS)


def attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes that the constructor left in a module of torch.nn, without parameters and children."""
    hidden = _OWN_STATE | _RNN_CACHES if isinstance(module, nn.RNNBase) else _OWN_STATE
    for name, value in vars(module).items():
        if name not in hidden:
            yield name, value


def functions_of(leaf: str, attribute: str) -> frozenset[str]:
    """Return the names of the functions that a module of torch.nn may hold in an attribute and call."""
    return _ACTIVATIONS if (leaf, attribute) in _CALLS else frozenset()


def may_hold(cls: type[nn.Module], name: str) -> bool:
    """Return whether an attribute of this name hides neither a method nor state that nn.Module itself keeps."""
    found = inspect.getattr_static(cls, name, None)
    return not (name in _OF_ANY_MODULE or is_dunder(name) or callable(found) or hasattr(found, "__get__"))


def may_have_slot(cls: type[nn.Module], name: str) -> bool:
    """Return whether a parameter, buffer or child of this name hides nothing of the class."""
    return not (name in _OWN_STATE or is_dunder(name) or hasattr(cls, name))


def new(name: str) -> nn.Module:
    """Return a module of the class `name`, without state."""
    cls = classes()[name]
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def finish(module: nn.Module) -> None:
    """Rebuild the state that a module derives from its parameters.

    Raises:
        Fault: a recurrent module names weights that are not its parameters, or a module lacks its rate of dropout.
    """
    drops = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
    if drops and not isinstance(vars(module).get("dropout"), (int, float)):
        raise Fault("the module has no rate of dropout")
    if isinstance(module, nn.RNNBase):
        flat, nested = (vars(module).get(name) for name in _RNN_NAMES)
        rows = [flat, *nested] if isinstance(flat, list) and isinstance(nested, list) else [None]
        if not all(isinstance(row, list) and all(_is_weight(module, name) for name in row) for row in rows):
            raise Fault("a recurrent module names weights that are not its parameters")
        try:
            module._init_flat_weights()
            fits = _fits(module)
        except Exception as error:  # noqa: BLE001 - whatever it stumbles over is a fault of the names
            raise Fault(f"the recurrent module does not fit its weights: {error}") from None
        if not fits:
            raise Fault("the weights of a recurrent module do not have the sizes that its attributes imply")


_GATES: Mapping[type, int] = {nn.LSTM: 4, nn.GRU: 3}
"""Number of gates stacked in the weights of a recurrent module; one for all other modules."""


def _fits(module: nn.RNNBase) -> bool:
    """Return whether each weight has its size and its position: torch splits them into gates without a check."""
    sizes: tuple[object, ...] = (module.input_size, module.hidden_size, module.num_layers, module.proj_size)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        return False
    if module.proj_size and not isinstance(module, nn.LSTM):
        return False
    gates, directions = _GATES.get(type(module), 1) * module.hidden_size, 2 if module.bidirectional else 1
    out = module.proj_size or module.hidden_size
    expected: list[tuple[int, ...]] = []
    for layer in range(min(module.num_layers, len(module._flat_weights))):
        width = module.input_size if layer == 0 else out * directions
        for _ in range(directions):
            expected += [(gates, width), (gates, out), *([(gates,)] * 2 if module.bias else ())]
            expected += [(out, module.hidden_size)] if module.proj_size else []
    return [weight is not None and tuple(weight.shape) for weight in module._flat_weights] == expected


def _is_weight(module: nn.Module, name: object) -> bool:
    return isinstance(name, str) and isinstance(module._parameters.get(name), torch.Tensor)


def check_names(module: pb.Module) -> None:
    """Raise Fault unless the parts of a module have distinct names that hide nothing."""
    cls, reserved = _holder(module)
    seen: set[str] = set()
    for what, slots in (("parameter", module.parameters), ("buffer", module.buffers), ("child", module.children)):
        for slot in slots:
            check_atom(slot.name, what)
            if slot.name in seen or slot.name in reserved or not may_have_slot(cls, slot.name):
                raise Fault(f"{what} {slot.name!r} hides something else of this name", "Rename it.")
            seen.add(slot.name)
    for attribute in module.attributes:
        check_atom(attribute.name, "attribute")
        if attribute.name in seen or attribute.name in reserved or not may_hold(cls, attribute.name):
            raise Fault(f"attribute {attribute.name!r} hides something else of this name", "Rename it.")
        seen.add(attribute.name)


def _holder(module: pb.Module) -> tuple[type[nn.Module], frozenset[str]]:
    kind = module.WhichOneof("kind")
    if kind == "leaf":
        return classes()[module.leaf], frozenset()
    if kind == "parallel":
        return DataParallel, frozenset()
    return (CapturedModule, _graph_state()) if kind == "graph" else (OpaqueModule, frozenset(vars(OpaqueModule(""))))


class Slots:
    """Finds the parts of a message's modules by name, in constant time."""

    def __init__(self, graph: pb.Graph) -> None:
        self._modules = graph.modules
        self._tables: dict[int, dict[str, int | None]] = {}

    def of(self, module: int) -> Mapping[str, int | None]:
        """Return the names of a module's slots, with the index of the module in each, if there is one."""
        if module not in self._tables:
            message = self._modules[module]
            table: dict[str, int | None] = {
                slot.name: None for slots in (message.parameters, message.buffers, message.attributes) for slot in slots
            }
            table |= {slot.name: slot.module if slot.HasField("module") else None for slot in message.children}
            self._tables[module] = table
        return self._tables[module]

    def find(self, module: int, path: str) -> int | None:
        """Return the index of the module at a path; None if another slot is there.

        Raises:
            Fault: there is no slot.
        """
        *steps, last = path.split(".")
        for step in steps:
            child = self.of(module).get(step)
            if child is None:
                raise Fault(f"there is no module {path[:200]!r}")
            module = child
        if last not in self.of(module):
            raise Fault(f"there is no {path[:200]!r}")
        return self.of(module)[last]


@cache
def _graph_state() -> frozenset[str]:
    """Return the attributes in which a GraphModule keeps its graph, code and pytree specifications."""
    return frozenset(vars(CapturedModule(nn.Module(), Graph()))) | {"_in_spec", "_out_spec"}


def write_data_parallel(message: pb.DataParallel, module: DataParallel) -> None:
    """Write everything but the module inside."""
    message.group, message.ranks, message.oddity = module.group, module.ranks, module.oddity
    for name, value in asdict(module.options).items():
        if value is not None:
            setattr(message, name, value)


def read_options(message: pb.DataParallel) -> DataParallelOptions:
    """Return how the module is wrapped."""
    unset = {} if message.HasField("bucket_cap_mb") else {"bucket_cap_mb": None}
    values: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    return DataParallelOptions(**{**values, **unset})


def read_data_parallel(message: pb.DataParallel, inside: nn.Module) -> DataParallel:
    """Return a stand-in for the wrapped module, for use without a process group."""
    return DataParallel(inside, read_options(message), group=message.group, ranks=message.ranks, oddity=message.oddity)


def check_data_parallel(module: pb.Module, limits: Limits) -> None:
    """Raise Fault unless a wrapped module holds one module and nothing else, and its options exist."""
    message = module.parallel
    parts = len(module.children) + len(module.parameters) + len(module.buffers) + len(module.attributes)
    if parts != 1 or not module.children or module.children[0].name != "module":
        raise Fault("a DistributedDataParallel holds one child, 'module', and nothing else")
    if not module.children[0].HasField("module"):
        raise Fault("a DistributedDataParallel holds no module")
    check_label(message.group)
    check_comment(message.oddity, limits)
    if not message.ranks:
        raise Fault("a process group has at least one rank")
    if message.hook and message.hook not in HOOKS:
        raise Fault(f"{message.hook[:80]!r} is not a known communication hook")
    if message.HasField("bucket_cap_mb") and not (math.isfinite(message.bucket_cap_mb) and message.bucket_cap_mb > 0):
        raise Fault("the size of a bucket must be positive and finite")
