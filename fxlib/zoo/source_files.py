"""Note the files that a model was made from, so that a later run knows that nothing has changed.

A process that makes a model notes which files it imported and opened, each in the state that it then had: one that is
edited later has changed. Files in `site-packages` are noted as a whole, by the distributions installed there, and the
standard library by its version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

MOST_FILES: Final = 20_000
"""Maximum number of files that are noted; a model made from more is always made anew."""

ABSENT: Final = (-1, -1)
"""The state of a file that is not there."""
_ELSEWHERE: Final = ("/proc/", "/sys/", "/dev/", "/etc/", "/tmp/torchinductor")  # noqa: S108 - nothing is written there
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_READERS: Final = (
    ("safetensors", "safe_open"),
    ("safetensors.torch", "safe_open"),
    ("torch.export", "load"),
    ("torch.jit", "load"),
)
"""Functions, by module and name, that open the files which they are given without Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The state of the files that a model was made from.

    Attributes:
        files: [size in bytes, time of the last change in nanoseconds] by path; `ABSENT` for one that was looked for,
            and was not there.
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
            if (known[path] or ABSENT) != tuple(state):
                return False
        return True


class Observer:
    """Records the files that this process reads from now on, each in its state when it is first opened.

    Files that libraries open without Python are seen where a function of `_READERS` is called for it.
    """

    def __init__(self) -> None:
        self._libraries = (*_ELSEWHERE, *_libraries())
        self._environment = environment()
        self._files: dict[str, tuple[int, int] | None] = {}
        self._complete = True
        sys.addaudithook(self._note)
        self._read_modules()
        for module, name in _READERS:
            home = importlib.import_module(module)
            setattr(home, name, self._observed(getattr(home, name)))

    def found(self) -> Dependencies:
        """Return all files that were read, and those of all modules that are imported."""
        self._read_modules()
        states = {path: state or _state(path) for path, state in sorted(self._files.items())}
        kept = {path: state or ABSENT for path, state in states.items() if not _was_temporary(path)}
        return Dependencies(
            files=dict(itertools.islice(kept.items(), MOST_FILES)),
            environment=self._environment,
            complete=self._complete and len(kept) <= MOST_FILES,
        )

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (event == "open" and not _writes(arguments)) or event == "ctypes.dlopen":
            self._read(arguments[0])
        elif event == "import":
            self._read(arguments[1])  # the file of a module that is not written in Python
        elif event == "sqlite3.connect":
            self._read(arguments[0])
            self._complete &= not os.fsdecode(arguments[0]).startswith("file:")  # a URI, which may name any file

    def _observed(self, reader: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(reader, updated=())
        def observed(*args: Any, **kwargs: Any) -> T:
            for each in (*args, *kwargs.values()):
                self._read(each)
            return reader(*args, **kwargs)

        return observed

    def _read_modules(self) -> None:
        for each in list(sys.modules.values()):
            self._read(getattr(each, "__file__", None))

    def _read(self, file: object) -> None:
        """Note a file, if it is one: by its absolute path, in its state now unless it was seen before."""
        if not isinstance(file, (str, bytes, os.PathLike)):
            return
        try:
            path = str(Path.cwd() / _source(os.fsdecode(file)))
        except OSError:  # nobody finds a file by a relative path in a folder that was deleted
            return
        if not path.startswith(self._libraries) and self._files.get(path) is None:
            self._files[path] = _state(path)


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


def _source(path: str) -> str:
    """Return the file that bytecode was compiled from, to which Python compares it; any other path as it is."""
    with contextlib.suppress(ValueError):
        return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path
    return path


def _state(path: str) -> tuple[int, int] | None:
    """Return [size in bytes, time of the last change in nanoseconds] of a file; None if there is no file."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _was_temporary(path: str) -> bool:
    return path.startswith(tempfile.gettempdir() + os.sep) and not Path(path).exists()


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return ("r" not in mode) if isinstance(mode, str) else bool(flags & _WRITES)
