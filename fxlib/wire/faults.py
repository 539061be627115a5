"""What is wrong with one value, before it is known at which node and in which field it stands; limits of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxlib.errors import LimitError, WireError


class Fault(Exception):  # noqa: N818 - it becomes the error
    """A fault without its place; whoever knows the place turns it into the error that a caller sees."""

    kind: type[WireError] = WireError

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self._path = ""

    def inside(self, part: str) -> None:
        """Say that all that is known so far lies in `part` of something larger: ".field", or "[index]"."""
        self._path = part + self._path

    def at(self, where: str) -> WireError:
        """Return the error that names the place, given where what the fault lies inside of stands."""
        return self.kind(self.message, where=where + self._path, hint=self.hint)


class Excess(Fault):
    """A limit that is exceeded."""

    kind = LimitError


def excess(what: str, value: int, limit: int, field: str) -> Excess:
    """Return the fault that `value` exceeds `Limits.field`."""
    return Excess(f"{what}: {value:,} exceeds the limit of {limit:,}", f"Raise Limits.{field} if this is meant.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on received data; what exceeds one is refused with a `LimitError` that names it."""

    graph_bytes: int = 256 << 20
    """Size of a serialized graph, without weights."""
    nodes: int = 1_000_000
    """Nodes in all bodies together."""
    steps: int = 10_000_000
    """Nodes and modules that one forward runs; those of a nested GraphModule count at each call."""
    modules: int = 100_000
    """Paths in the module tree; a module that is shared counts once for each path to it."""
    nesting: int = 32
    """Containers in containers, annotations in annotations, modules in modules."""
    text_chars: int = 1 << 20
    """Characters of one string."""
    integer_bits: int = 4096
    """Bits of one integer."""
    tensor_dims: int = 64
    """Dimensions of one tensor."""
    tensor_elements: int = 1 << 40
    """Elements of one tensor, as its shape has them."""
    weights_bytes: int = 64 << 30
    """Size of all storages together."""


DEFAULT = Limits()
