"""The operators that run inside a node, with the arithmetic that each does and the bytes that it moves.

A layer or a function of torch is made of one or more ATen operators; those are what a device runs, one after another.
FLOPs are by the formulas of `torch.utils.flop_counter` (two for a multiplication with an addition; matrix products,
convolutions and attention; nothing else counts). Bytes are what an operator has to read and to write at least once;
elements are the values in them, and of pooling those in all of its windows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from fxlib.analysis.operators.in_place import is_view
from fxlib.inspection.tensors import Size, bytes_of, count_of, memory_of, tensors_in
from fxlib.inspection.work import LOOKUPS, flops_of, window_of, work_of

_aten = torch.ops.aten
_FREE: frozenset[object] = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""Operators that neither read nor write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator that a device runs."""

    name: str
    flops: Size
    read_bytes: Size
    written_bytes: Size
    elements: Size
    """Values that it goes through, one by one."""
    dtype: torch.dtype
    work: str
    """Its kind, one of `work.WORK`."""
    is_view: bool = False
    """It only makes a new tensor over the same memory: nothing for the device to do."""

    @property
    def operator(self) -> str:
        """The name without the overload, such as `aten.add`."""
        return self.name.rpartition(".")[0]


class Operations(TorchDispatchMode):
    """Notes the operators that run under it; to be entered inside of the mode that makes fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def taken(self) -> tuple[Operation, ...]:
        """Return what was found since this was last called."""
        found, self.found = tuple(self.found), []
        return found

    @override
    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor, such as its device
            self.found.append(_operation(func, args, kwargs or {}, made))
        return made


def _operation(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Operation:
    given, results = list(tensors_in((args, kwargs))), list(tensors_in(made))
    written = _written(func, args, kwargs)
    known = {memory_of(each) for each in given}
    fresh = [each for each in results if memory_of(each) not in known]
    shares = bool(given) and bool(results) and not fresh and not written
    free = shares or is_view(func) or func.overloadpacket in _FREE
    read = [] if free else list(_read(func, given, fresh))
    writes = [] if free else [*written, *fresh]
    window = window_of(func, args)
    return Operation(
        name=str(func),
        flops=flops_of(func, args, kwargs, made),
        read_bytes=sum(map(bytes_of, read)),
        written_bytes=sum(map(bytes_of, writes)),
        elements=count_of(results[0]) * window if window > 1 else sum(map(count_of, (*read, *writes))),
        dtype=next((each.dtype for each in (*results, *given)), torch.float32),
        work=work_of(func, args),
        is_view=free,
    )


def _read(func: OpOverload[..., Any], given: list[torch.Tensor], fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*fresh, *given[1:]] if func.overloadpacket in LOOKUPS else given


def _written(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [
        tensor
        for place, name in _writes(func)
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(name))
    ]


@functools.cache
def _writes(func: OpOverload[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return place and name of each argument that an operator writes, by its schema."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
