"""Tell whether a value is unchanged: the same tensors, of the same version, and RRefs, in the same containers."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch.distributed import rpc

_COPIED_BYTES = 1 << 20
"""Size in bytes up to which a tensor's bits are compared, too."""
_COPIED_INDEX_BYTES = 1 << 26
"""The same of tensors of integers, which are the keys of rows."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes; compared as integers, NaN equals itself."""

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


class Noted:
    """A value as it was when it was noted. Tensors are kept alive, so that no other tensor can get their identity.

    torch does not count writes through `.data`, NumPy or DLPack. So the bits of small tensors, such as indices, are
    kept and compared.
    """

    __slots__ = ("_bits", "_tensor", "_value", "_version")

    def __init__(self, value: Any) -> None:
        """Note a value.

        Raises:
            ValueError: later changes of the value could not be detected.
        """
        self._tensor, self._version, self._bits = None, -1, None
        self._value: Any = None
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise ValueError("a tensor that takes a gradient")
            if value.is_inference():
                raise ValueError("a tensor of inference mode, whose changes torch does not count")
            self._tensor, self._version = value, value._version
            self._bits = None if (bits := bits_of(value)) is None else bits.clone()
        else:
            self._value = _noted(value)

    def is_still(self, value: Any) -> bool:
        """Whether a value is the one that was noted, unchanged."""
        if self._tensor is not None:
            if value is not self._tensor or value._version != self._version:
                return False
            return self._bits is None or torch.equal(cast("torch.Tensor", bits_of(value)), self._bits)
        return _is_still(self._value, value)


def bits_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a small tensor's bits as integers; None for a large one, or one that is not in plain host memory."""
    if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    dtype = tensor.dtype
    most = _COPIED_BYTES if dtype.is_floating_point or dtype.is_complex else _COPIED_INDEX_BYTES
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.nbytes > most:
        return None
    words = _WORDS.get(dtype.itemsize)
    if words is None:
        return None
    return tensor if dtype is words else tensor.view(words)


def note(value: Any) -> Noted | None:
    """Note a value; return None if later changes could not be detected."""
    try:
        return Noted(value)
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Same:
    """An object that nothing changes, and that no other one equals."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """The class of a container, the keys of a dict, and the parts, as they were noted."""

    kind: type
    keys: tuple[Any, ...] | None
    parts: tuple[Any, ...]


def _noted(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return Noted(value)
    if isinstance(value, rpc.PyRRef):
        return _Same(value)
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return _Container(kind, None, tuple(map(_noted, value)))
    if kind is dict:
        return _Container(kind, tuple(value), tuple(map(_noted, value.values())))
    raise ValueError(f"an object of class {kind.__qualname__}")


def _is_still(was: Any, value: Any) -> bool:
    if isinstance(was, Noted):
        return was.is_still(value)
    if isinstance(was, _Same):
        return was.value is value
    if not isinstance(was, _Container):
        return type(was) is type(value) and bool(was == value)
    return was.kind is type(value) and _are_still(was, value)


def _are_still(was: _Container, value: Any) -> bool:
    if len(value) != len(was.parts) or (was.keys is not None and tuple(value) != was.keys):
        return False
    return all(map(_is_still, was.parts, value if was.keys is None else value.values()))
