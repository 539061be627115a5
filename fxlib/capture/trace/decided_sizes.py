"""Sizes of arguments by which a forward decides: they are known from samples, and each run is held to them.

A loop over a dimension (`for t in range(x.size(1))`), a loop over micro-batches (`for part in x.split(8)`), a branch by
the number of dimensions and an assertion about a shape cannot be traced for all sizes. If samples are given, they are
traced for the samples' sizes; each size that was read becomes a fact, and with other sizes the original forward runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from typing_extensions import override

from fxlib.capture.intercept import suspended
from fxlib.capture.recording.argument_assumptions import path_of_node
from fxlib.capture.trace.values import TracedAttribute, TracedValue
from fxlib.runtime.guards.capture_facts import follow

UNKNOWN: Final = object()
_METHODS: Final[Mapping[Any, str]] = {"size": "shape", "dim": "ndim", "ndimension": "ndim"}
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "is_cuda"})
_OF_NUMBERS = frozenset({"_operator", "math", "builtins"})
_RESHAPES = frozenset(
    {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_"}
    | {"as_strided_", "sparse_resize_", "sparse_resize_and_clear_"}
)
"""Names of the in-place operations after which a tensor has another shape."""
_PARTS: Final[Mapping[Any, str]] = {
    "split": "split",
    "chunk": "chunk",
    "unbind": "unbind",
    torch.split: "split",
    torch.chunk: "chunk",
    torch.unbind: "unbind",
}
"""Methods and functions that split a tensor into parts along a dimension, each with the method's name."""
SizePath = tuple[str, tuple[tuple[str, Any], ...], Node | None]
"""The argument (empty: the model), the steps from there to what is read, and the node of an argument that has parts."""


class DecidedSizes:
    """Computes traced values that depend only on sizes of arguments and of the model's tensors."""

    def __init__(self, samples: Mapping[str, Any], note: Callable[[SizePath, Any], None]) -> None:
        self._samples, self._note = samples, note
        self.root: nn.Module | None = None  # the model, whose tensors have sizes as well

    def of(self, node: Node) -> Any:
        """Return a node's value and note the sizes on which it depends, or `UNKNOWN` if it depends on anything else."""
        with suspended():
            used: dict[SizePath, Any] = {}
            found = UNKNOWN if is_reshaping(node.graph) else self._of(node, used)
            for place, value in used.items() if found is not UNKNOWN else ():
                self._note(place, value)
        return found

    def length(self, node: Node) -> Any:
        """Return the length of a tensor that is an argument, or of its shape, and `UNKNOWN` for anything else."""
        with suspended():
            place = self._of_tensor(node, ("getattr", "shape"), ("getitem", 0))
            if place is not None and not is_reshaping(node.graph) and (size := self._follow(place)) is not UNKNOWN:
                self._note(place, size)
                return size
        if (parts := self.parts(node)) is not None:
            return parts
        shape = self.of(node)
        return len(shape) if isinstance(shape, tuple) else UNKNOWN

    def parts(self, node: Node) -> int | None:
        """Return the number of parts into which a node splits an argument, and note the size; None if it does not."""
        name = _PARTS.get(node.target)
        of, *given = node.args
        if name is None or not isinstance(of, Node) or len(node.all_input_nodes) > 1:
            return None
        with suspended():
            if (place := self._of_tensor(of)) is None or is_reshaping(node.graph):
                return None
            tensor = self._follow(place)
            try:
                found = len(getattr(tensor.detach(), name)(*given, **node.kwargs))
                dim = node.kwargs.get("dim", (*given, 0)[0 if name == "unbind" else 1])
                *_, size = read = ("getattr", "shape"), ("getitem", range(tensor.dim())[cast(int, dim)])
            except Exception:  # noqa: BLE001 - the forward itself will raise it
                return None
            self._note((place[0], (*place[1], *read), of if place[1] else None), tensor.shape[size[1]])
        return found

    def _of(self, node: Node, used: dict[SizePath, Any]) -> Any:
        if (place := self._read(node)) is not None:
            found = self._follow(place)
            used[place] = found
            return found
        inputs = node.all_input_nodes
        own = node.op == "call_function" and getattr(node.target, "__module__", None) in _OF_NUMBERS
        if not own or not inputs:
            return UNKNOWN
        values = {each: self._of(each, used) for each in inputs}
        if any(each is UNKNOWN for each in values.values()):
            return UNKNOWN
        target: Any = node.target
        try:
            return target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))
        except Exception:  # noqa: BLE001 - the forward itself will raise it
            return UNKNOWN

    def _read(self, node: Node) -> SizePath | None:
        """Return the place of the metadata that a node reads of a tensor, or None if it does something else."""
        of, keys = (node.args[0], node.args[1:]) if node.args else (None, ())
        if not isinstance(of, Node) or node.kwargs or any(isinstance(each, Node) for each in keys):
            return None
        if node.op == "call_method" and node.target in _METHODS:
            return self._of_tensor(of, ("getattr", _METHODS[node.target]), *(("getitem", each) for each in keys))
        if node.target is getattr and keys[0] in _ATTRIBUTES:
            return self._of_tensor(of, ("getattr", keys[0]))
        if node.target is operator.getitem and (inner := self._read(of)) is not None:
            return inner[0], (*inner[1], ("getitem", keys[0])), inner[2]
        return None

    def _of_tensor(self, node: Node, *steps: tuple[str, Any]) -> SizePath | None:
        """Return the place to which `steps` lead from a tensor that is an argument, a part of one, or the model's."""
        found = path_of_node(node)
        if found is None or not isinstance(self._follow(found), torch.Tensor):
            return None
        name, to_tensor, argument = found
        return name, (*to_tensor, *steps), argument if to_tensor else None

    def _follow(self, place: SizePath) -> Any:
        try:
            return follow(self._samples[place[0]] if place[0] else self.root, place[1])
        except Exception:  # noqa: BLE001 - the forward itself will raise it
            return UNKNOWN


def is_reshaping(graph: Graph) -> bool:
    """Return whether the graph reshapes a tensor in place, or by `out=`, so that a tensor may have another shape."""
    return any(_name(node.target) in _RESHAPES or node.kwargs.get("out") is not None for node in graph.nodes)


def _name(target: Any) -> str:
    return str(target if isinstance(target, str) else getattr(target, "__name__", "")).partition(".")[0]


class _Decides:
    """A mixin that answers Python's requests for a number if the number depends on sizes alone."""

    node: Node
    tracer: Any

    def _number(self, convert: Callable[[Any], Any]) -> Any:
        found = self.tracer.sizes.of(self.node)
        if found is UNKNOWN:
            raise TypeError(f"{type(self).__name__!r} object cannot be interpreted as a number")
        return convert(found)

    def __index__(self) -> int:
        return int(self._number(operator.index))

    def __int__(self) -> int:
        return int(self._number(int))

    def __float__(self) -> float:
        return float(self._number(float))


class SizedValue(_Decides, TracedValue):
    """A traced value whose sizes may be read."""

    @override
    def __len__(self) -> int:
        found = self.tracer.sizes.length(self.node)
        return super().__len__() if found is UNKNOWN else int(found)

    @override
    def _attribute(self, name: str) -> TracedAttribute:
        return SizedAttribute(self, name)


class SizedAttribute(_Decides, TracedAttribute):
    """An attribute of a traced value: `x.ndim`, `x.shape`."""

    def __len__(self) -> int:
        found = self.tracer.sizes.length(self.node)
        if found is UNKNOWN:
            raise TypeError("the length of a traced value is asked for, and only a run knows it")
        return int(found)


def known_iterator(sizes: DecidedSizes, proxy: Proxy) -> Iterator[Any] | None:
    """Return an iterator over a shape or over the parts of a tensor, or None for anything else."""
    if (parts := sizes.parts(proxy.node)) is not None:
        several: Any = proxy
        return iter([several[index] for index in range(parts)])
    found = sizes.of(proxy.node)
    return iter(found) if isinstance(found, tuple) else None
