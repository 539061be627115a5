"""How large a received graph may be."""

from __future__ import annotations

from dataclasses import dataclass


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
