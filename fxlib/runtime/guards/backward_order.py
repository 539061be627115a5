"""What a program lets depend on the order in which backward runs, besides the sums that a rewrite keeps.

A rewrite keeps the order in which each tensor's gradients add up, and may change which of two branches comes first. Two
hooks that share state, or draw random numbers, then see their gradients in another order; and where a backward makes a
graph of its own (`create_graph=True`), second derivatives add up in the order in which it did.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fxlib.errors import FxlibWarning


class BackwardOrder:
    """Whether the order in which backward runs shows, as far as is known of one module."""

    def __init__(self) -> None:
        self._makes_graphs = False
        self._handles = -1
        """How many hooks this process had registered, on anything, when parameters were looked at and had none."""

    def shows(self, tensors: Iterable[Any]) -> str:
        """Return why the order shows, in words; empty if it does not.

        Args:
            tensors: that may have hooks: parameters, and arguments of the forward.
        """
        if self._makes_graphs:
            return "a backward made a graph (create_graph=True), and second derivatives add up in the order it runs in"
        if self._handles == RemovableHandle.next_id:
            return ""
        hooked = [each for each in tensors if isinstance(each, torch.Tensor) and _has_hooks(each)]
        if len(hooked) > 1:
            return "several parameters or arguments have hooks, which may share state, and run in the order of backward"
        self._handles = -1 if hooked else RemovableHandle.next_id
        return ""

    def watch(self, result: Any) -> None:
        """Learn of a backward through the result of a forward that makes a graph."""
        if self._makes_graphs:
            return
        known = self._handles == RemovableHandle.next_id
        many = result.values() if isinstance(result, dict) else result
        for each in many if isinstance(result, dict | tuple | list) else (result,):
            if type(each) is torch.Tensor and each.grad_fn is not None:
                each.grad_fn.register_prehook(self._came)
        if known:  # those that were registered since are these
            self._handles = RemovableHandle.next_id

    def _came(self, _: Any) -> None:
        if torch.is_grad_enabled() and not self._makes_graphs:
            self._makes_graphs = True
            warnings.warn(
                "a backward makes a graph (create_graph=True): second derivatives of this step may differ from the "
                "original's in their last bits; that runs from the next forward on",
                FxlibWarning,
                stacklevel=2,
            )


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
