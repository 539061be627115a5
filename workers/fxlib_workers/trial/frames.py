"""The messages between a process of a trial and its host, on a socket of their own: a length, then that many bytes."""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("!Q")

MAKE: Final = "make"
"""The method of the first call, which makes the object that answers the others: a server or a trainer."""

LONGEST_ANSWER: Final = 64 << 20
"""The longest answer that a host accepts from a process of a trial, in bytes."""


def framed(message: bytes) -> bytes:
    """Return the bytes that are sent for a message."""
    return HEADER.pack(len(message)) + message
