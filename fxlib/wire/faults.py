"""A problem with one value, raised before its node and field are known; and the limits of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxlib.errors import LimitError, WireError


class Fault(Exception):  # noqa: N818 - it becomes the error
    """A fault without its location; whoever knows the location turns it into the error that a caller sees."""

    kind: type[WireError] = WireError

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self._path = ""

    def inside(self, part: str) -> None:
        """Record that everything known so far lies in `part` of something larger: ".field", or "[index]"."""
        self._path = part + self._path

    def at(self, where: str) -> WireError:
        """Return the error with the full location, given that of the value that contains the fault."""
        return self.kind(self.message, where=where + self._path, hint=self.hint)


class Excess(Fault):
    """An exceeded limit."""

    kind = LimitError


def excess(what: str, value: int, limit: int, field: str) -> Excess:
    """Return the fault that `value` exceeds `Limits.field`."""
    return Excess(f"{what}: {value:,} exceeds the limit of {limit:,}", f"Raise Limits.{field} if this is meant.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on received data; data that exceeds one is refused with a `LimitError` that names the bound."""

    graph_bytes: int = 256 << 20
    """Maximum size of a serialized graph in bytes, without weights."""
    nodes: int = 1_000_000
    """Maximum number of nodes in all bodies together."""
    steps: int = 10_000_000
    """Maximum number of nodes and modules that one forward runs; those of a nested GraphModule count at each call."""
    modules: int = 100_000
    """Maximum number of paths in the module tree; a shared module counts once for each path to it."""
    nesting: int = 32
    """Maximum depth of containers in containers, annotations in annotations, modules in modules."""
    text_chars: int = 1 << 20
    """Maximum number of characters in one string."""
    integer_bits: int = 4096
    """Maximum number of bits of one integer."""
    tensor_dims: int = 64
    """Maximum number of dimensions of one tensor."""
    tensor_elements: int = 1 << 40
    """Maximum number of elements of one tensor, according to its shape."""
    weights_bytes: int = 64 << 30
    """Maximum size of all storages together, in bytes."""


DEFAULT = Limits()
