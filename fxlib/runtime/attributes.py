"""Attributes that a received graph reads: data, and nothing that could be called.

Whoever wrote the graph chose the names. What may be called, and could be given a name of the writer's choice, would run
under the name of an allowed method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

from fxlib.errors import WireError

_HARMLESS = (Proxy, torch.device)
"""Both can be called: the first records the call, the second makes a decorator."""


def check_data(value: object, name: str) -> None:
    """Check that a value which goes by a name of a graph's is data.

    Raises:
        WireError: it can be called.
    """
    if callable(value) and not isinstance(value, _HARMLESS):
        raise WireError(
            f"{name!r} is a {type(value).__name__}, which can be called, and a received graph handles only data"
        )


def read_attribute(value: Any, name: str, *default: Any) -> Any:
    """Read an attribute as `getattr` does: what a decoded graph calls in its place, where the name is no tensor's own.

    Raises:
        AttributeError: there is none of this name, and no default.
        WireError: what was found can be called.
    """
    found = getattr(value, name, *default)
    check_data(found, name)
    return found
