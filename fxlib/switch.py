"""The switch that turns fxlib off."""

from __future__ import annotations

import os

DISABLE = "FXLIB_DISABLE"
"""Environment variable: set to anything but "" or "0", it has every launcher train with its original module."""


def disabled() -> bool:
    """Whether the environment says that every module stays the original."""
    return os.environ.get(DISABLE, "") not in ("", "0")
