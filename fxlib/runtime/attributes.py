"""Attributes that a received graph reads: they are data, and nothing that can be called.

Whoever wrote the graph chose the names. If an attribute could be called, the writer could give it the name of an
allowed method and have it run under that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

from fxlib.errors import WireError

_HARMLESS = (Proxy, torch.device)
"""Classes whose objects can be called without harm: the first records the call, the second makes a decorator."""


def check_data(value: object, name: str) -> None:
    """Check that the value which a graph reads under a name is data.

    Raises:
        WireError: the value can be called.
    """
    if callable(value) and not isinstance(value, _HARMLESS):
        raise WireError(
            f"{name!r} is a {type(value).__name__}, which can be called, and a received graph handles only data"
        )


def read_attribute(value: Any, name: str, *default: Any) -> Any:
    """Read an attribute as `getattr` does; decoded graphs call this in its place for names that are not a tensor's own.

    Raises:
        AttributeError: there is no attribute of this name, and no default.
        WireError: the value of the attribute can be called.
    """
    found = getattr(value, name, *default)
    check_data(found, name)
    return found
