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

_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
"""The schemes of gRPC's own targets, which are not "host:port" alone."""

TORCH_VERSIONS = ((2, 13), (2, 14))
"""The first version of torch whose programs this release rewrites, and the first one after the last."""


def service_address() -> str:
    """Return the address of the service according to the environment; by default, it is on this machine."""
    return os.environ.get(SERVICE) or DEFAULT_ADDRESS


def is_address(text: str) -> bool:
    """Return whether a text is "host:port", a socket ("unix:PATH"), or a target in one of gRPC's own schemes."""
    if text.startswith("unix:") or "/" in text:
        return text.partition(":")[0] in _SCHEMES
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def read_address(text: str) -> str:
    """Return a text that is the address of a service.

    Raises:
        ValueError: it is none.
    """
    if is_address(text):
        return text
    meant = text.partition("://")[2].rstrip("/")
    raise ValueError(f"{text!r} is no HOST:PORT, such as {meant if is_address(meant) else DEFAULT_ADDRESS}")


def disabled() -> bool:
    """Return whether the environment says that every module stays the original."""
    return os.environ.get(DISABLE, "") not in ("", "0")
