"""The folder by which this user's services on this machine are found, and that no other user may enter.

It holds a socket and a token for each, named by the service's port: `8470.sock` and `8470.token`. Both disappear with
the service, and each start makes a new token: a process that listens on the port instead learns nothing useful.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from fxlib.errors import FxlibError

RUNTIME_DIR: Final = "FXLIB_RUNTIME_DIR"
"""Environment variable: the folder to use if service and launchers do not share /tmp."""

TOKEN_FILE: Final = "FXLIB_TOKEN_FILE"
"""Environment variable: the file of the token that a launcher presents and a service requires."""

_MAX_TOKEN: Final = 4096
_MAX_SOCKET_PATH: Final = 107
_PROBE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalService:
    """The files of the service on one port."""

    folder: Path
    port: int

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        return self.folder / f"{self.port}.sock"

    @property
    def token(self) -> Path:
        """The file of the token that the port requires."""
        return self.folder / f"{self.port}.token"

    @property
    def target(self) -> str:
        """The socket in gRPC's notation; "" if its path is too long for a socket."""
        path = os.fsencode(self.socket)
        return f"unix:{quote(path)}" if len(path) <= _MAX_SOCKET_PATH else ""

    def answers(self) -> bool:
        """Return whether a process listens on the socket; a killed service leaves its socket behind."""
        if not self.target:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def write_token(self, token: str) -> None:
        """Write the token, readable by this user only, in place of what an earlier service left.

        Raises:
            FxlibError: the file cannot be written.
        """
        unfinished = self.token.with_suffix(f".{os.getpid()}")
        try:
            unfinished.unlink(missing_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(token)
            unfinished.replace(self.token)
        except OSError as error:
            raise FxlibError(error.strerror or str(error), where=str(self.token)) from error

    def touch(self) -> None:
        """Touch the files, so that cleaners of /tmp keep them."""
        for path in (self.folder, self.socket, self.token):
            with suppress(OSError):
                os.utime(path)

    def remove(self) -> None:
        """Remove the files."""
        for path in (self.socket, self.token):
            with suppress(OSError):
                path.unlink()


def remove_dead(folder: Path, *, older_than_s: float) -> None:
    """Remove the files of killed services: nothing answers there, and nothing has touched them for so long."""
    names = {path.stem for path in folder.iterdir() if path.suffix in (".sock", ".token") and path.stem.isdecimal()}
    for each in (LocalService(folder=folder, port=int(name)) for name in names):
        ages = [time.time() - path.stat().st_mtime for path in (each.socket, each.token) if path.exists()]
        if ages and min(ages) > older_than_s and not each.answers():
            each.remove()


def make_folder() -> Path:
    """Return the folder, and create it if it does not exist.

    Raises:
        FxlibError: the folder cannot be created, or other users may enter it.
    """
    path = _path()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        problem = _problem(path)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise FxlibError(problem, where=str(path), hint=f"Name a folder of your own with {RUNTIME_DIR}.")
    return path


def find(port: int) -> LocalService | None:
    """Return the files of this user's service on a port; None if there is no folder that only this user may enter."""
    path = _path()
    try:
        return None if _problem(path) else LocalService(folder=path, port=port)
    except OSError:
        return None


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Return whether a text may be a token: one line of printable ASCII without blanks, and not too long."""
    return 0 < len(text) <= _MAX_TOKEN and text.isascii() and text.isprintable() and " " not in text


def read_token(path: Path) -> str:
    """Read a token from its file.

    Raises:
        FxlibError: the file cannot be read, or holds no token; the message does not contain its contents.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_TOKEN + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise FxlibError(f"the token cannot be read: {error.strerror}", where=str(path)) from error
    if not is_token(text):
        raise FxlibError("it holds no token, which is one line of printable characters", where=str(path))
    return text


def _path() -> Path:
    return Path(os.environ.get(RUNTIME_DIR) or f"/tmp/fxlib-{os.getuid()}")  # noqa: S108 - checked before it is used


def _problem(path: Path) -> str:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return "other users may enter it"
    return ""
