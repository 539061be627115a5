"""Tell whether a program can see the order in which backward runs, which a rewrite may change.

A rewrite keeps the order in which each tensor's gradients add up, and may change which of two branches comes first. Two
hooks that share state, or draw random numbers, then see their gradients in another order; and if a backward makes a
graph of its own (`create_graph=True`), second derivatives add up in the order in which that backward ran.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fxlib.errors import FxlibWarning
from fxlib.runtime.guards.tensor_metadata import TiedParameters
from fxlib.utils.pytree import leaves


class BackwardOrder:
    """Tells whether the order in which backward runs shows, as far as is known for one module."""

    def __init__(self) -> None:
        self.makes_graphs = False
        """Whether a backward has made a graph (`create_graph=True`)."""
        self._handles = -1
        """The number of hooks that this process had registered, on anything, when the parameters were seen without."""
        self._seen: Sequence[int] = ()
        """The identities of these parameters."""

    def shows(self, arguments: Iterable[Any], parameters: TiedParameters, *, returns_several: bool) -> str:
        """Return why the order shows, in words; empty if it does not.

        Args:
            arguments: the arguments of the forward, which may have hooks, and are others in each step.
            parameters: the parameters, which may have hooks, too.
            returns_several: whether the forward returns several values. They may get hooks later; those of a single one
                run first, whatever the order.
        """
        if self.makes_graphs:
            return "a backward made a graph (create_graph=True), and second derivatives add up in the order it runs in"
        hooked = sum(map(_has_hooks, arguments))
        if self._handles != RemovableHandle.next_id or self._seen is not parameters.identities:
            of_parameters = sum(map(_has_hooks, parameters.parameters()))
            self._handles = -1 if of_parameters else RemovableHandle.next_id
            self._seen = parameters.identities
            hooked += of_parameters
        if hooked + returns_several > 1:
            return "parameters or arguments have hooks, which may share state, and run in the order of backward"
        return ""

    def watch(self, result: Any) -> None:
        """Watch the result of a forward for a backward through it that makes a graph."""
        if self.makes_graphs:
            return
        known = self._handles == RemovableHandle.next_id
        many = result.values() if isinstance(result, dict) else result
        found: Iterable[Any] = many if isinstance(result, dict | tuple | list) else (result,)
        if any(type(each) is not torch.Tensor for each in found):  # this is rare, and takes longer
            found = [leaf for _, leaf in leaves(result)]
        for each in found:
            if type(each) is torch.Tensor and each.grad_fn is not None:
                each.grad_fn.register_prehook(self._came)
        if known:  # the hooks that were registered since are these
            self._handles = RemovableHandle.next_id

    def _came(self, _: Any) -> None:
        if torch.is_grad_enabled() and not self.makes_graphs:
            self.makes_graphs = True
            warnings.warn(
                "a backward makes a graph (create_graph=True): second derivatives of this step may differ from the "
                "original's in their last bits; that runs from the next forward on",
                FxlibWarning,
                stacklevel=2,
            )


def _has_hooks(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return bool(value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None))
