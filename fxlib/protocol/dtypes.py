"""Data types by name."""

from __future__ import annotations

import torch

from fxlib.protocol.converter import Rule
from fxlib.wire.constants import DTYPES
from fxlib.wire.faults import Fault


def dtype_to_text(dtype: torch.dtype) -> str:
    """Return the dtype's name: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_text(name: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises:
        Fault: there is none.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise Fault(f"no dtype is called {name!r}") from None


DTYPE = Rule(dtype_to_text, dtype_from_text)
"""The rule of a field that holds the name of a dtype."""
