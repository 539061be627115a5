"""Facts that are certain about traced values: their classes, for `isinstance(x, torch.Tensor)`, and some metadata.

A parametrization may decide by values that are computed from parameters and buffers alone. These values have the same
shape and dtype in each run as long as the parameters keep theirs, which each run then checks
(`fxlib.runtime.guards.tensor_metadata`).
"""

from __future__ import annotations

import functools
import operator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn.modules.rnn import RNNBase

from fxlib.capture import source
from fxlib.capture.intercept import suspended
from fxlib.capture.metadata import attribute_of
from fxlib.runtime.ops.calls import COLLECTIVE, kind_of

# These are abstract base classes, single dispatch, the metaclass of parameters, and torch's pytree.
_ASKING_FOR_OTHERS = ("<frozen abc>", "functools.py", "torch/nn/parameter.py", "torch/utils/_pytree.py")
_SEVERAL = (RNNBase, nn.LSTMCell, nn.MultiheadAttention, nn.AdaptiveLogSoftmaxWithLoss, nn.ModuleList, nn.ModuleDict)
_CASTS = frozenset(
    {"bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short"}
    | {"cpu", "cuda", "reshape_as", "type_as"}
)
_NUMBERS = frozenset({"item", "dim", "ndimension", "numel", "nelement", "element_size"})
_SHAPES = frozenset({"size", "stride"})
_PLAIN_METADATA = frozenset({"dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes"})
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_ARITHMETIC = frozenset(
    {"abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "inv", "invert", "le", "lt", "matmul", "mod"}
    | {"mul", "ne", "neg", "or_", "pos", "pow", "sub", "truediv", "xor"}
)
ANSWERED = frozenset({"shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "dtype", "device"})
"""Names of the tensor attributes and methods that this metadata answers."""


def asked_by_the_program(frame: FrameType | None) -> bool:
    """Return whether the frame that asks for a class is the user's own, or Python's on its behalf."""
    while frame is not None and frame.f_code.co_filename.endswith(_ASKING_FOR_OTHERS):
        frame = frame.f_back
    return frame is not None and source.is_users(frame)


def class_of(node: Node, root: nn.Module, relied: dict[Node, type]) -> type | None:
    """Return the class that the node's value surely has, or None if only a run knows it.

    Args:
        node: the node of the value.
        root: the model.
        relied: a dict that receives the classes that inputs of the graph are assumed to have; each run has to check
            them.
    """
    if node.op == "placeholder":
        # An input of another class is fixed by `concrete_args=`, or declared by its annotation.
        plain = node.type is None or node.type in (torch.Tensor, torch.Tensor | None, "torch.Tensor", "Tensor")
        found = torch.Tensor if plain else _plain_class(node.type)
        if found is not None:
            relied[node] = found
        return found
    if node.op == "get_attr":
        with suspended():
            return type(attribute_of(root, str(node.target)))
    return torch.Tensor if _is_tensor(node, root, relied) else None


def is_number(node: Node) -> bool:
    """Return whether a node's value is surely a number or the like, and no container: a size, a dtype, arithmetic."""
    if node.op == "call_method":
        return node.target in _NUMBERS or (node.target in _SHAPES and len(node.args) > 1)
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _PLAIN_METADATA
    if node.target is operator.getitem:
        shape, index = node.args
        of_shape = isinstance(shape, Node) and (
            (shape.target is getattr and shape.args[1] == "shape") or shape.target in _SHAPES
        )
        return of_shape and type(index) is int
    inputs = node.all_input_nodes
    return getattr(node.target, "__module__", "") == "_operator" and bool(inputs) and all(map(is_number, inputs))


def _plain_class(annotation: object) -> type | None:
    return annotation if isinstance(annotation, type) and annotation in (int, float, bool, str, rpc.RRef) else None


def _is_tensor(node: Node, root: nn.Module, relied: dict[Node, type]) -> bool:
    target: Any = node.target
    if kind_of(node) is COLLECTIVE:
        return True  # the lists that collectives return have declared structures
    if node.op == "call_module":
        return _module_makes_a_tensor(root.get_submodule(target), node, root, relied)
    if node.kwargs.get("as_tuple"):  # of nonzero
        return False
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target is getattr:
        return node.args[1] in _ATTRIBUTES and _given_tensor(node, root, relied)
    if node.op == "call_method":
        return _given_tensor(node, root, relied) and (name in _CASTS or _makes_one_tensor(name))
    if getattr(target, "__module__", "") == "_operator":
        made_in_place = name.removeprefix("i") in _ARITHMETIC
        return (name in _ARITHMETIC or made_in_place) and _given_tensor(node, root, relied)
    is_torchs = name in torch.__dict__ or name in nn.functional.__dict__
    return is_torchs and not node.kwargs.get("return_indices") and _makes_one_tensor(name)


def _given_tensor(node: Node, root: nn.Module, relied: dict[Node, type]) -> bool:
    values = [value for value in node.args if isinstance(value, Node)]
    relevant = values if getattr(node.target, "__name__", "") != "getitem" else values[:1]
    return any(issubclass(class_of(value, root, relied) or object, torch.Tensor) for value in relevant)


def _module_makes_a_tensor(module: nn.Module, node: Node, root: nn.Module, relied: dict[Node, type]) -> bool:
    if isinstance(module, (nn.Identity, nn.Sequential)):
        return isinstance(module, nn.Identity) and _given_tensor(node, root, relied)
    is_own = type(module).__module__.startswith("torch.nn.modules.")
    return is_own and not isinstance(module, _SEVERAL) and not getattr(module, "return_indices", False)


@functools.cache
def _makes_one_tensor(name: str) -> bool:
    """Return whether an operator returns one tensor, according to torch's own schemas."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    returns = [getattr(packet, each)._schema.returns for each in packet.overloads()]
    return all(len(each) == 1 and each[0].type.isSubtypeOf(torch._C.TensorType.get()) for each in returns)


class ParameterMetadata:
    """Computes the metadata of values, once for each node, on tensors that have no memory."""

    def __init__(self) -> None:
        self._known: dict[Node, Any] = {}

    def of(self, node: Node, root: nn.Module) -> torch.Tensor | None:
        """Return a tensor on the device "meta" with a node's metadata, or None if the value is no tensor or unknown."""
        with suspended(), torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                found = self._value(node, root)
            except Exception:  # noqa: BLE001 - a value that cannot be computed is not known
                return None
        return found if isinstance(found, torch.Tensor) else None

    def device_of(self, node: Node, root: nn.Module) -> torch.device | None:
        """Return the device of the tensors from which a node's value is computed, or None if they are on several."""
        found, seen, ahead = set(), {node}, [node]
        while ahead:
            each = ahead.pop()
            if each.op == "get_attr":
                with suspended():
                    found.add(getattr(attribute_of(root, str(each.target)), "device", None))
            ahead.extend(new for new in each.all_input_nodes if new not in seen)
            seen.update(each.all_input_nodes)
        return found.pop() if len(found) == 1 else None

    def _value(self, node: Node, root: nn.Module) -> Any:
        if node not in self._known:
            self._known[node] = self._computed(node, root)
        return self._known[node]

    def _computed(self, node: Node, root: nn.Module) -> Any:
        if node.op == "get_attr":
            held = attribute_of(root, str(node.target))
            return torch.empty_like(held, device="meta") if isinstance(held, torch.Tensor) else _refuse(node)
        args: Any = map_arg(node.args, lambda given: self._value(given, root))
        kwargs: Any = map_arg(node.kwargs, lambda given: self._value(given, root))
        if node.op == "call_method":
            own, *rest = args
            return getattr(own, str(node.target))(*rest, **kwargs)
        return node.target(*args, **kwargs) if node.op == "call_function" else _refuse(node)  # type: ignore[operator]


def _refuse(node: Node) -> Any:
    raise TypeError(node.op)
