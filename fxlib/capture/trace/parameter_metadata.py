"""The metadata of values that are computed from parameters and buffers alone, by which a parametrization may decide.

Such values have the same shape and dtype in each run as long as the parameters keep theirs, which each run then checks
 (`fxlib.runtime.guards.tensor_metadata`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from fxlib.capture.intercept import suspended
from fxlib.capture.metadata import attribute_of

ANSWERED = frozenset({"shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "dtype", "device"})
"""Names of the attributes and methods of tensors that this metadata answers."""


class ParameterMetadata:
    """Computes the metadata of values with tensors that have no memory, once for each node."""

    def __init__(self) -> None:
        self._known: dict[Node, Any] = {}

    def of(self, node: Node, root: nn.Module) -> torch.Tensor | None:
        """Return a tensor on the device "meta" with a node's metadata; None if its value is no tensor, or unknown."""
        with suspended(), torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                found = self._value(node, root)
            except Exception:  # noqa: BLE001 - what cannot be followed is not known
                return None
        return found if isinstance(found, torch.Tensor) else None

    def device_of(self, node: Node, root: nn.Module) -> torch.device | None:
        """Return the device of the tensors that a node's value is computed from; None if they are on several."""
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
