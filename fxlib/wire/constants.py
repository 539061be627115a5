"""torch's own constants by their exact names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import torch

from fxlib.wire.faults import Fault

T = TypeVar("T")


def _named(values: Iterable[T]) -> dict[str, T]:
    return {str(value).removeprefix("torch."): value for value in values}


DTYPES: dict[str, torch.dtype] = _named(value for value in vars(torch).values() if isinstance(value, torch.dtype))
LAYOUTS: dict[str, torch.layout] = _named(value for value in vars(torch).values() if isinstance(value, torch.layout))
MEMORY_FORMATS: dict[str, torch.memory_format] = _named(
    value for value in vars(torch).values() if isinstance(value, torch.memory_format)
)
QSCHEMES: dict[str, torch.qscheme] = _named(value for value in vars(torch).values() if isinstance(value, torch.qscheme))

_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps|hpu|mtia|privateuseone)(:\d{1,3})?")


def check_device(name: str) -> None:
    """Raise Fault unless the text names a device, which this machine need not have."""
    if _DEVICE.fullmatch(name) is None:
        raise Fault(f"unknown device {name[:80]!r}")
