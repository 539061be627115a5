"""Modules of torch's own classes: which of them can be rebuilt from their attributes, without their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fxlib.wire.faults import Fault
from fxlib.wire.memory_safety import reached_outside
from fxlib.wire.names import is_dunder

_OWN_STATE = frozenset(vars(nn.Module()))
"""Where nn.Module keeps parameters, children, hooks and flags."""
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


@cache
def classes() -> Mapping[str, type[nn.Module]]:
    """Classes of torch.nn by name that stay inside of their tensors whatever their attributes are."""
    return {name: cls for name, cls in candidates().items() if not reached_outside(f"torch.nn.modules.{name}")}


@cache
def candidates() -> Mapping[str, type[nn.Module]]:
    """Classes of torch.nn by name, without those that choose their own class when they first run."""
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
    """Whether calling the module, or saving it, runs code that its class does not hold."""
    return any(vars(module).get(name) for name in _HOOKS)


def attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what the constructor left in a module of torch.nn besides parameters, buffers and children."""
    hidden = _OWN_STATE | _RNN_CACHES if isinstance(module, nn.RNNBase) else _OWN_STATE
    for name, value in vars(module).items():
        if name not in hidden:
            yield name, value


def functions_of(leaf: str, attribute: str) -> frozenset[str]:
    """Return the names of the functions that a module of torch.nn may hold in an attribute, to call them."""
    return _ACTIVATIONS if (leaf, attribute) in _CALLS else frozenset()


def may_hold(cls: type[nn.Module], name: str) -> bool:
    """Whether an attribute of this name hides neither a method nor the state that nn.Module itself keeps."""
    found = inspect.getattr_static(cls, name, None)
    return not (name in _OF_ANY_MODULE or is_dunder(name) or callable(found) or hasattr(found, "__get__"))


def may_have_slot(cls: type[nn.Module], name: str) -> bool:
    """Whether a parameter, buffer or child of this name hides nothing of the class."""
    return not (name in _OWN_STATE or is_dunder(name) or hasattr(cls, name))


def new(name: str) -> nn.Module:
    """Return a module of the class `name`, without state."""
    cls = classes()[name]
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def finish(module: nn.Module) -> None:
    """Rebuild what a module derives from its parameters.

    Raises:
        Fault: a recurrent module names weights that are not its parameters.
    """
    if isinstance(module, nn.RNNBase):
        flat, nested = (vars(module).get(name) for name in _RNN_NAMES)
        rows = [flat, *nested] if isinstance(flat, list) and isinstance(nested, list) else [None]
        if not all(isinstance(row, list) and all(_is_weight(module, name) for name in row) for row in rows):
            raise Fault("the names of a recurrent module's weights are not those of its parameters")
        try:
            module._init_flat_weights()
            fits = _fits(module)
        except Exception as error:  # noqa: BLE001 - whatever it stumbles over is a fault of the names
            raise Fault(f"the recurrent module does not fit its weights: {error}") from None
        if not fits:
            raise Fault("the weights of a recurrent module do not have the sizes that its attributes say")


_GATES: Mapping[type, int] = {nn.LSTM: 4, nn.GRU: 3}
"""How many gates a recurrent module's weights hold below each other; all others: one."""


def _fits(module: nn.RNNBase) -> bool:
    """Whether each weight has its size, and stands in its place: torch cuts them into gates unchecked."""
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
