"""Settings from the environment: whether fxlib is on, and where its service is; and the supported versions of torch."""

from __future__ import annotations

import os

DISABLE = "FXLIB_DISABLE"
"""Environment variable; if it is set to anything but "" or "0", every launcher trains with its original module."""

SERVICE = "FXLIB_SERVICE"
"""Environment variable: "host:port" of the service, for launchers and commands that do not name one."""

CACHE = "FXLIB_CACHE"
"""Environment variable: the folder in which launchers keep what OpenVINO and ONNX Runtime made of parts of a graph; ""
keeps nothing."""

DEFAULT_ADDRESS = "localhost:8470"

TORCH_VERSIONS = ((2, 13), (2, 14))
"""The first version of torch whose programs this release rewrites, and the first one after the last."""


def service_address() -> str:
    """Return the address of the service according to the environment; by default, it is on this machine."""
    return os.environ.get(SERVICE) or DEFAULT_ADDRESS


def is_address(text: str) -> bool:
    """Return whether a text is "host:port", a socket ("unix:PATH"), or a target in one of gRPC's own schemes."""
    if text.startswith("unix:") or "/" in text:
        return True
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def disabled() -> bool:
    """Return whether the environment says that every module stays the original."""
    return os.environ.get(DISABLE, "") not in ("", "0")
