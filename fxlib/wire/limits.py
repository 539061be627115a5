"""How large a received graph may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on received data; what exceeds one is refused with a `LimitError` that names it."""

    graph_bytes: int = 256 << 20
    """Serialized graph, without weights."""
    nodes: int = 1_000_000
    """In all bodies together."""
    steps: int = 10_000_000
    """Nodes and modules that one forward runs; those of a nested GraphModule count at each call."""
    modules: int = 100_000
    """Paths in the module tree; a module that is shared counts once for each path to it."""
    nesting: int = 32
    """Containers in containers, annotations in annotations, modules in modules."""
    text_chars: int = 1 << 20
    """One string."""
    integer_bits: int = 4096
    """One integer."""
    tensor_dims: int = 64
    """Dimensions of one tensor."""
    tensor_elements: int = 1 << 40
    """Elements of one tensor, as its shape has them."""
    weights_bytes: int = 64 << 30
    """All storages together."""


DEFAULT = Limits()
