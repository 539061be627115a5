"""Note the files that a model was made from, so that a later run knows that nothing has changed.

A process that makes a model notes which files it imported and opened. Files in `site-packages` are noted as a whole, by
the distributions installed there, and the standard library by its version.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MOST_FILES: Final = 20_000
"""Maximum number of files that are noted; a model made from more is always made anew."""

_ELSEWHERE: Final = ("/proc/", "/sys/", "/dev/", "/etc/", "/tmp/torchinductor")  # noqa: S108 - nothing is written there
_WRITES: Final = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The state of the files that a model was made from.

    Attributes:
        files: [size in bytes, time of the last change in nanoseconds] by path.
        environment: a hash of Python's version and the distributions installed.
        complete: whether all files are noted.
    """

    files: Mapping[str, tuple[int, int]]
    environment: str
    complete: bool = True

    def unchanged(self, known: dict[str, tuple[int, int] | None], environment: str) -> bool:
        """Return whether all files are as they were.

        Args:
            known: the states of files that were looked up before; this method adds to them.
            environment: the hash of the environment now.
        """
        if not self.complete or self.environment != environment:
            return False
        for path, state in self.files.items():
            if path not in known:
                known[path] = _state(path)
            if known[path] != tuple(state):
                return False
        return True


class Observer:
    """Records the files that this process reads from now on."""

    def __init__(self) -> None:
        self._opened = set[str]()
        sys.addaudithook(self._note)

    def found(self) -> Dependencies:
        """Return the state of all files that were read, and of all modules that are imported."""
        modules = (getattr(each, "__file__", None) for each in list(sys.modules.values()))
        libraries = _libraries()
        paths = {str(Path.cwd() / path) for path in (*self._opened, *filter(None, modules))}
        kept = sorted(path for path in paths if not path.startswith((*_ELSEWHERE, *libraries)) and Path(path).is_file())
        states = {path: state for path in kept[:MOST_FILES] if (state := _state(path)) is not None}
        return Dependencies(files=states, environment=environment(), complete=len(kept) <= MOST_FILES)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and not _writes(arguments):
            self._opened.add(os.fspath(arguments[0]))


def environment() -> str:
    """Return a hash of Python's version and of the installed distributions, with the times of their installation."""
    installed = [sys.version]
    for folder in sorted(_libraries()):
        if Path(folder).is_dir():
            with os.scandir(folder) as entries:
                installed += sorted(
                    f"{each.name} {each.stat().st_mtime_ns}" for each in entries if _is_record(each.name)
                )
    return hashlib.sha256("\n".join(installed).encode()).hexdigest()


def _libraries() -> frozenset[str]:
    """Return the folders of the standard library and of installed packages, each with a trailing slash."""
    paths = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(f"{each}{os.sep}" for path in paths for each in (path, path.resolve()))


def _is_record(name: str) -> bool:
    return name.endswith((".dist-info", ".egg-info", ".egg-link"))


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return ("r" not in mode) if isinstance(mode, str) else bool(flags & _WRITES)
