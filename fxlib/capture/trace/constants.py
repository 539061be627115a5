"""A tensor that a torch call without traced arguments makes: a node of the graph, whose value is known meanwhile."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Proxy
from typing_extensions import override

from fxlib.capture.faults import fault
from fxlib.capture.trace.values import TracedValue

FACTORIES = frozenset({"arange", "eye", "full", "linspace", "logspace", "ones", "tensor", "zeros", "as_tensor"})
"""Their results depend on their arguments alone."""

_METADATA = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda"})


class KnownTensor(TracedValue):
    """What `torch.arange(3)` gives: `for i in torch.arange(3)` or `int(torch.tensor(4))` need no run to be decided.

    Its value is told as long as no node of the graph uses it, and so none can have written to it.
    """

    def __init__(self, proxy: Proxy, make: Callable[[], torch.Tensor]) -> None:
        super().__init__(proxy.node, proxy.tracer)
        self._make = make

    _fields = TracedValue._fields | {"_make", "_value"}

    @functools.cached_property
    def _value(self) -> torch.Tensor:
        self.tracer.depth += 1  # what the tracer computes for itself is not recorded
        try:
            return self._make()
        finally:
            self.tracer.depth -= 1

    @override
    def _class(self) -> type:
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name) if name in _METADATA else super().__getattr__(name)

    def known(self) -> torch.Tensor:
        """Return the value.

        Raises:
            CaptureError: it may have been written to since it was made.
        """
        if self.node.users:
            raise fault(
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
        return int(self._value.shape[0])

    def __iter__(self) -> Iterator[Any]:
        get = operator.getitem
        return iter([self.tracer.create_proxy("call_function", get, (self, index), {}) for index in range(len(self))])

    def item(self) -> Any:
        """Return the only element."""
        return self.known().item()

    def tolist(self) -> Any:
        """Return the elements."""
        return self.known().tolist()

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self._value.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one size of it."""
        return self._value.shape if dim is None else self._value.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self._value.shape.numel()
