"""What the environment says: whether fxlib is on, and where its service is; and for which versions of torch it is."""

from __future__ import annotations

import os

DISABLE = "FXLIB_DISABLE"
"""Environment variable: set to anything but "" or "0", it has every launcher train with its original module."""

SERVICE = "FXLIB_SERVICE"
"""Environment variable: "host:port" of the service, for launchers and commands that do not name one."""

DEFAULT_ADDRESS = "localhost:8470"

TORCH_VERSIONS = ((2, 13), (2, 14))
"""The first version of torch whose programs this release rewrites, and the first one after the last."""


def service_address() -> str:
    """Return where the environment says that the service is; by default, on this machine."""
    return os.environ.get(SERVICE) or DEFAULT_ADDRESS


def disabled() -> bool:
    """Whether the environment says that every module stays the original."""
    return os.environ.get(DISABLE, "") not in ("", "0")
