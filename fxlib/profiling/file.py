"""Profiles as files: a mark of eight bytes, the SHA-256 of what follows, and the profile as a protobuf message.

Nothing in a file is executed.
"""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError

from fxlib import protocol
from fxlib.errors import LimitError, WireError
from fxlib.serialization.files import digest_of, write_whole
from fxlib.spec.profile import Profile
from fxlib.v1 import profile_pb2

MARK = b"\x93FXP\r\n\x1a\n"
"""The bytes at the beginning of every file; see `fxlib.serialization.files.MARK`."""

MAX_BYTES = 64 << 20
_DIGEST_BYTES = 32


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, by convention `*.fxp`. The file is written atomically.

    Raises:
        WireError: the format cannot represent a leaf of a result.
        OSError: the file cannot be written.
    """
    message = protocol.profile_to_proto(profile).SerializeToString(deterministic=True)
    write_whole(Path(path), (MARK, digest_of(message), message))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file.

    Raises:
        LimitError: the file exceeds a limit.
        WireError: the file is not a profile, is truncated or damaged, or holds an invalid figure.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        mark, digest, data = file.read(len(MARK)), file.read(_DIGEST_BYTES), file.read(MAX_BYTES + 1)
    if mark != MARK:
        raise WireError("the file does not begin like one that fxlib.save_profile wrote", where=str(path))
    if len(data) > MAX_BYTES:
        raise LimitError(f"more than {MAX_BYTES:,} bytes", where=str(path))
    if digest_of(data) != digest:
        problem = "the profile does not match its digest: the file is cut off or damaged"
        raise WireError(problem, where=str(path), hint="Save or copy it again.")
    try:
        message = profile_pb2.Profile.FromString(data)
    except DecodeError as error:
        raise WireError(f"the file does not hold a profile: {error}", where=str(path)) from error
    return protocol.profile_from_proto(message)
