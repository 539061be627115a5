"""Profiles as files: a mark of eight bytes, then the profile as a protobuf message. Nothing in a file is executed."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError

from fxlib import protocol
from fxlib.errors import LimitError, WireError
from fxlib.serialization.files import write_whole
from fxlib.spec.profile import Profile
from fxlib.v1 import profile_pb2

MARK = b"\x93FXP\r\n\x1a\n"
"""The bytes at the beginning of every file; see `fxlib.serialization.files.MARK`."""

MAX_BYTES = 64 << 20


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, by convention `*.fxp`. The file is written atomically.

    Raises:
        WireError: the format cannot represent a leaf of a result.
        OSError: the file cannot be written.
    """
    message = protocol.profile_to_proto(profile).SerializeToString(deterministic=True)
    write_whole(Path(path), (MARK, message))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file.

    Raises:
        LimitError: the file exceeds a limit.
        WireError: the file is not a profile, is truncated, or holds an invalid figure.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(len(MARK) + MAX_BYTES + 1)
    if not data.startswith(MARK):
        raise WireError("the file does not begin like one that fxlib.save_profile wrote", where=str(path))
    if len(data) > len(MARK) + MAX_BYTES:
        raise LimitError(f"more than {MAX_BYTES:,} bytes", where=str(path))
    try:
        message = profile_pb2.Profile.FromString(data[len(MARK) :])
    except DecodeError as error:
        raise WireError(f"the file does not hold a profile: {error}", where=str(path)) from error
    return protocol.profile_from_proto(message)
