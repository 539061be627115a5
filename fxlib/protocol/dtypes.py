"""Data types by name."""

from __future__ import annotations

import torch

from fxlib.errors import WireError
from fxlib.wire.constants import DTYPES


def dtype_to_text(dtype: torch.dtype) -> str:
    """Return the dtype's name: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_text(name: str, where: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises:
        WireError: there is none.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise WireError(f"no dtype is called {name!r}", where=where) from None
