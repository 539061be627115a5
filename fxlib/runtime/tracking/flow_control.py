"""Limits on what one forward has in flight to each server, enforced while it runs.

A schedule keeps the limits by its order, as far as sizes were known when it was made. Here each issue is held back
until enough of the earlier calls to its server have been answered. Answers arrive without the forward's help, so no
issue is held forever; a call that is larger than the limit goes alone.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch


class Future(Protocol):
    """A call in flight, as far as flow control asks it."""

    def done(self) -> bool:
        """Whether the call has been answered."""

    def wait(self) -> Any:
        """Block until the call has been answered, and return its result."""


InFlight = TypeVar("InFlight", bound=Future)


@dataclass(slots=True)
class _Call:
    function: str
    size: int
    future: Future


@dataclass(slots=True)
class _Server:
    calls: deque[_Call] = field(default_factory=deque)
    size: int = 0


class FlowControl:
    """What one forward has in flight to each server, and its limits; only the thread of the forward uses it."""

    def __init__(self, calls: int | None, size: int | None) -> None:
        """Begin with nothing in flight."""
        self._most_calls = calls
        self._most_bytes = size
        self._servers: dict[str, _Server] = {}

    def start(self, server: str, function: str, sent: object, issue: Callable[[], InFlight]) -> InFlight:
        """Issue a call to a server as soon as the limits admit it, and return its future."""
        found = self._servers.setdefault(server, _Server())
        out = tensor_bytes(sent)
        self._prune(found)
        while found.calls and not self._admits(found, out + _RETURNED.get(function, 0)):
            with contextlib.suppress(Exception):  # the call's own wait raises it
                found.calls[0].future.wait()
            self._prune(found)
        future = issue()
        call = _Call(function, out + _RETURNED.get(function, 0), future)
        found.calls.append(call)
        found.size += call.size
        return future

    def _admits(self, server: _Server, size: int) -> bool:
        if self._most_calls is not None and len(server.calls) >= self._most_calls:
            return False
        return self._most_bytes is None or server.size + size <= self._most_bytes

    @staticmethod
    def _prune(server: _Server) -> None:
        for _ in range(len(server.calls)):
            call = server.calls.popleft()
            if not call.future.done():
                server.calls.append(call)
                continue
            server.size -= call.size
            with contextlib.suppress(Exception):  # the call's own wait raises it
                _RETURNED[call.function] = max(_RETURNED.get(call.function, 0), tensor_bytes(call.future.wait()))


def tensor_bytes(value: object) -> int:
    """Return the bytes of all tensors in a nest of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout not in _SPARSE else _sparse_bytes(value)
    if isinstance(value, (tuple, list)):
        return sum(map(tensor_bytes, value))
    return sum(map(tensor_bytes, value.values())) if isinstance(value, Mapping) else 0


def _sparse_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the values and of their indices in the COO format, which is near enough for other formats."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return values.nbytes + 8 * tensor._nnz() * tensor.ndim


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_RETURNED: dict[str, int] = {}
"""The most bytes that each function has returned, as far as a limited forward has seen it."""
