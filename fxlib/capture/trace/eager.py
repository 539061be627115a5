"""Record torch calls without traced arguments as well, so that no result is computed once and kept.

While it traces, torch.fx runs `torch.rand(3)`, `torch.zeros(2)` or an operation on a plain tensor attribute, and keeps
the result as a constant: every later step would see the same random numbers, or a buffer of zeros that earlier steps
wrote to. Here, such calls become nodes. Attributes of a tensor that need no computation (`shape`, `dtype`) are answered
at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from typing_extensions import override

from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import is_capturing
from fxlib.capture.trace.decided_sizes import SizedValue, is_reshaping
from fxlib.capture.trace.tracer import RemoteTracer
from fxlib.capture.trace.values import TracedValue, value_of
from fxlib.capture.trace.writes import writes_to

_VALUES = frozenset(
    {"__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__repr__", "__format__"}
    | {"item", "tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"}
)
"""Names of the methods that ask for the elements of a tensor."""
_ANSWERED = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"}
    | {
        "__len__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "__repr__",
        "__format__",
    }
    | {"item", "tolist", "numpy", "__array__", "type", "equal", "allclose", "data_ptr", "result_type", "can_cast"}
    | {"promote_types", "has_names", "__hash__", "__reduce_ex__", "__deepcopy__", "untyped_storage"}
)


class EagerCalls(TorchFunctionMode):
    """A torch function mode that passes calls without a traced argument to the tracer."""

    def __init__(self, tracer: RemoteTracer) -> None:
        super().__init__()
        self._tracer = tracer

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            return self._set_grad_enabled(*args)
        traced = any(issubclass(each, Proxy) for each in types)
        if traced or self._tracer.depth or not is_capturing():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _ANSWERED or name.startswith(("is_", "_is_", "_has_")) or isinstance(func, type):  # torch.device
            self._tracer.answered = True
            self._refuse_written(name, (*args, *kwargs.values()))
            if name in _VALUES:
                self._note_values((*args, *kwargs.values()))
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args[0])
        result = self._record(func, args, kwargs)
        if name == "unbind":  # Python calls it to iterate over a tensor
            return value_of(result, [None] * args[0].shape[kwargs.get("dim", args[1] if len(args) > 1 else 0)])
        return result

    def _refuse_written(self, name: str, asked: tuple[Any, ...]) -> None:
        """Refuse to answer for a tensor to which a node has written, which the tracer has not done.

        Raises:
            CaptureError: there is such a node, and the answer depends on it.
        """
        tracer = self._tracer
        tracer.depth += 1
        try:
            depends = name in _VALUES or name in _HISTORY or name == "requires_grad" or is_reshaping(tracer.graph)
            tensors = [each for each in asked if isinstance(each, torch.Tensor)] if depends else ()
            if any(writes_to(tracer.graph, tracer.root, each) for each in tensors):
                raise capture_error(
                    "the forward writes to a tensor that is no buffer, and then asks for its elements or its shape",
                    hint="Register it as a buffer of the model, and decide by it outside of the forward.",
                )
        finally:
            tracer.depth -= 1

    def _note_values(self, values: tuple[Any, ...]) -> None:
        self._tracer.depth += 1
        try:
            for each in values:
                if isinstance(each, torch.Tensor):
                    self._tracer.recorder.value_asked(each)
        finally:
            self._tracer.depth -= 1

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        if is_tensor_method_or_property(func):
            return tracer.create_proxy("call_method", func.__name__, args, kwargs)
        name = tracer.graph._target_to_str(func)
        result = tracer.create_proxy("call_function", func, args, kwargs, name=name)
        known = name in FACTORIES and not result.node.all_input_nodes and type(result) in (TracedValue, SizedValue)
        return KnownTensor(result, lambda: func(*args, **kwargs)) if known else result

    def _attribute(self, getter: Any, tensor: torch.Tensor) -> Any:
        value = getter(tensor)
        name = getter.__self__.__name__
        if isinstance(value, torch.Tensor):
            return self._tracer.create_proxy("call_function", getattr, (tensor, name), {})
        self._tracer.answered = True
        self._refuse_written(name, (tensor,))
        self._tracer.asked_gradients |= name == "requires_grad"
        if name in _HISTORY:
            self._tracer.recorder.history_asked(tensor, name)
        return value

    def _set_grad_enabled(self, mode: bool) -> None:
        if not self._tracer.depth and is_capturing() and mode is not torch.is_grad_enabled():
            self._tracer.create_proxy("call_function", torch._C._set_grad_enabled, (mode,), {})
        torch._C._set_grad_enabled(mode)


FACTORIES = frozenset({"arange", "eye", "full", "linspace", "logspace", "ones", "tensor", "zeros", "as_tensor"})
"""Names of torch functions whose results depend on their arguments alone."""

_HISTORY = frozenset(
    {"grad", "grad_fn", "is_leaf", "retains_grad", "_backward_hooks", "_base", "_version", "output_nr"}
)
"""Attributes of a tensor that tell its history rather than its properties."""
_SHAPES = frozenset({"shape", "ndim"})
_METADATA = _SHAPES | {"dtype", "device", "layout", "requires_grad", "is_cuda"}


class KnownTensor(TracedValue):
    """A tensor whose value is known during the trace, as `for i in torch.arange(3)` and `int(torch.tensor(4))` require.

    Its value can be read as long as no node of the graph uses it, since until then no node can have written to it, and
    its shape as long as no node reshapes a tensor.
    """

    def __init__(self, proxy: Proxy, make: Callable[[], torch.Tensor]) -> None:
        super().__init__(proxy.node, proxy.tracer)
        self._make = make

    _fields = TracedValue._fields | {"_make", "_value"}

    @functools.cached_property
    def _value(self) -> torch.Tensor:
        self.tracer.depth += 1  # the tracer's own computations are not recorded
        try:
            return self._make()
        finally:
            self.tracer.depth -= 1

    @override
    def _class(self) -> type:
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        changed = bool(self.node.users) if name == "requires_grad" else name in _SHAPES and self._is_reshaped()
        return getattr(self._value, name) if name in _METADATA and not changed else super().__getattr__(name)

    def _is_reshaped(self) -> bool:
        return bool(self.node.users) and is_reshaping(self.node.graph)

    def known(self) -> torch.Tensor:
        """Return the value.

        Raises:
            CaptureError: the tensor may have been written to since it was made.
        """
        if self.node.users:
            raise capture_error(
                f"{self.node.name} decides which way the program goes, and may have been written to since it was made",
                hint="Decide it with Python's own numbers.",
            )
        return self._value

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __len__(self) -> int:
        return super().__len__() if self._is_reshaped() else int(self._value.shape[0])

    def __iter__(self) -> Iterator[Any]:
        get = operator.getitem
        return iter([self.tracer.create_proxy("call_function", get, (self, index), {}) for index in range(len(self))])

    def item(self) -> Any:
        """Return the only element."""
        return self.known().item()

    def tolist(self) -> Any:
        """Return the elements."""
        return self.known().tolist()

    def dim(self) -> Any:
        """Return the number of dimensions."""
        return self._attribute("dim")() if self._is_reshaped() else self._value.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one size of it."""
        if self._is_reshaped():
            return self._attribute("size")(*() if dim is None else (dim,))
        return self._value.shape if dim is None else self._value.shape[dim]

    def numel(self) -> Any:
        """Return the number of elements."""
        return self._attribute("numel")() if self._is_reshaped() else self._value.shape.numel()
