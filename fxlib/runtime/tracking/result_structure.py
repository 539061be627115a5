"""Check that a remote result has the structure that its contract declares, and map over structures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch

from fxlib.errors import ContractError
from fxlib.runtime.dynamo import outside_of_dynamo


@outside_of_dynamo
def check_structure(result: Any, function: str, declared: int | tuple[Any, ...]) -> None:
    """Check that a remote result has its declared number of elements, or its declared keys in their order.

    Raises:
        ContractError: the structure differs. The program as written would have raised, or done more.
    """
    if isinstance(declared, int):
        real: object = len(result) if isinstance(result, Sized) else f"none: it is a {type(result).__name__}"
    else:
        real = tuple(result) if isinstance(result, Mapping) else f"none: it is a {type(result).__name__}"
    if real != declared:
        what = "elements" if isinstance(declared, int) else "keys"
        raise ContractError(
            f"the contract declares {declared} {what} of the result, and it has {real}",
            where=function,
            hint="Correct returns=, and capture again.",
        )


@outside_of_dynamo
def check_tensor(result: Any, function: str, dtype: torch.dtype, sizes: tuple[int | None, ...]) -> None:
    """Check that a remote result, or a part of it, has the declared dtype and sizes; None stands for any size.

    Raises:
        ContractError: they differ. The program was captured with the dtype and sizes that the contract declares.
    """
    if isinstance(result, torch.Tensor):
        if result.dtype is dtype and result.shape == sizes:  # this compares in C, and most sizes have no None
            return
        alike = result.dtype is dtype and result.dim() == len(sizes)
        if alike and all(size in (None, real) for size, real in zip(sizes, result.shape, strict=True)):
            return
        found = f"{result.dtype} of shape {tuple(result.shape)}"
    else:
        found = f"a {type(result).__name__}"
    raise ContractError(
        f"the contract declares {dtype} of shape {sizes}, and the result is {found}",
        where=function,
        hint="Correct returns=, and capture again.",
    )


@outside_of_dynamo
def check_plain(result: Any, function: str, declared: object) -> None:
    """Check that a part of a remote result that is no tensor has its declared kind ("int", "float") or value.

    A flag, a string and None are declared by value, as a forward decides by them: `(False,)`, `("done",)`, `(None,)`.

    Raises:
        ContractError: it differs. The program was captured with the kind or value that the contract declares.
    """
    if isinstance(declared, tuple):
        alike = type(result) is type(declared[0]) and result == declared[0]
        wanted = repr(declared[0])
    else:
        alike, wanted = type(result).__name__ == declared, f"a number ({declared})"
    if not alike:
        raise ContractError(
            f"the contract declares {wanted} in the result, and it is {result!r:.80}",
            where=function,
            hint="Correct returns=, and capture again.",
        )


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return tuples (also named ones), lists and dicts like those in `value`, with everything else in them changed."""
    if type(value) in (tuple, list):
        return type(value)([mapped(each, change) for each in value])
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make([mapped(each, change) for each in value])
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, mapped(each, change)) for key, each in value.items())
        return copied
    return change(value)
