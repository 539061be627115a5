"""Notice a loader that writes over batches which it has handed out and the loop has not worked on yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlib.errors import FxlibError
from fxlib.pipeline.unchanged import bits_of
from fxlib.utils.pytree import leaves


@contextmanager
def still_as_they_are(batches: Sequence[Any]) -> Iterator[None]:
    """Check, at the end of the block, that batches are still as they are now.

    Raises:
        FxlibError: one of them is not.
    """
    before = [list(map(_Leaf, leaves_of(batch), leaves_of(batch))) for batch in batches]
    yield
    for batch, were in zip(batches, before, strict=True):
        now = leaves_of(batch)
        if len(now) != len(were) or not all(was.is_still(each) for was, each in zip(were, now, strict=True)):
            raise FxlibError(
                "the loader has changed a batch that the loop has not worked on yet, which is lost: "
                "it uses the memory of a batch again for another one",
                where="fxlib.pipeline(..., ahead=True)",
                hint="Leave ahead=True out, or have the loader yield copies (Tensor.clone, a new list or dict).",
            )


class _Leaf:
    """An object within a batch; of a tensor, its bits, or, if it is large, the number of writes that torch counts.

    Args:
        value: the object.
        again: what the batch has in this place when it is asked once more; a batch class may make it anew each time.
    """

    __slots__ = ("_bits", "_is_made_anew", "_value", "_version")

    def __init__(self, value: Any, again: Any) -> None:
        self._value, self._is_made_anew = value, again is not value
        self._version, self._bits = _state(value)
        self._bits = None if self._bits is None else self._bits.clone()

    def is_still(self, value: Any) -> bool:
        if value is not self._value and not self._is_made_anew:
            return False
        version, bits = _state(value)
        if self._bits is None or bits is None:
            return bits is self._bits and (version == self._version or self._is_made_anew)
        return torch.equal(bits, self._bits)


def leaves_of(batch: object) -> list[object]:
    """Return the leaves of a batch, those in dataclasses and plain objects among them."""
    try:
        return [each for _, each in leaves(batch)]
    except (AttributeError, RecursionError):  # an object lacks a field, or holds itself
        return pytree.tree_leaves(batch)


def _state(value: Any) -> tuple[int, torch.Tensor | None]:
    if not isinstance(value, torch.Tensor):
        return 0, None
    return 0 if value.is_inference() else value._version, bits_of(value.detach())
