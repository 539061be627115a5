"""Find the file and line of the user's program at which something happens."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent) + "/"
CAPTURE = str(Path(__file__).parent) + "/"
"""The path of this package's folder, with a slash at the end."""
LIBRARIES = (TORCH, str(Path(__file__).parents[1]) + "/", "<frozen", "<eval_with_key>")
"""Beginnings of the file names of code that is torch's, fxlib's, Python's own, or generated from a graph."""
STANDARD = sysconfig.get_path("stdlib") + "/"
_DECORATORS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_contextlib.py")
_OF_CLASSES = ("__create_fn__.", "<attrs generated")
"""Beginnings of the names of code, or of its file, that dataclasses and attrs generate as methods of a class."""
GENERATED = "_remote_module_"  # torch writes the methods of a RemoteModule to a temporary file


def user_frames(frame: FrameType | None, end: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of each of the user's frames, innermost first, up to but without the frame `end`."""
    while frame is not None and frame is not end:
        if is_users(frame):
            yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def here(end: FrameType | None = None) -> str:
    """Return file:line of the user's statement that is running now, or "" if there is none."""
    for code, line in user_frames(sys._getframe(1), end):
        return f"{code.co_filename}:{line}"
    return ""


def line_at(where: str) -> str:
    """Return the source line at file:line, or "" if it cannot be read."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file else ""


def of_error(error: BaseException) -> str:
    """Return file:line of the user's statement in which the error arose, or "" if there is none."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame):
            where = f"{frame.f_code.co_filename}:{line}"
    return where


def of_definition(thing: object) -> str:
    """Return file:line of a Python function's definition, or "" if it has none."""
    code = getattr(thing, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code: not torch's, Python's or fxlib's own, and not generated."""
    return _is_in_users_file(frame.f_code.co_filename) and not _is_generated(frame.f_code, frame.f_globals)


def is_users_code(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Return whether code with these global variables is the user's, be it from a file or typed in."""
    return _is_in_users_file(code.co_filename) and not _is_generated(code, scope)


def _is_generated(code: CodeType, scope: Mapping[str, Any]) -> bool:
    file = code.co_filename
    if not file.startswith("<"):
        return False
    return (
        code.co_qualname.startswith(_OF_CLASSES) or file.startswith(_OF_CLASSES) or is_generated_elsewhere(code, scope)
    )


def is_generated_elsewhere(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Return whether code was made from a text, as in dataclasses, for a class that is not the user's.

    Programs that are typed into a console or a notebook, or given to `python -c`, are made from a text, too.
    """
    if not code.co_filename.startswith("<"):
        return False
    package = str(scope.get("__name__", "")).partition(".")[0]
    if package == "__main__":
        return False
    return package in ("torch", "fxlib", "numpy", *sys.stdlib_module_names) or package.startswith("namedtuple_")


@functools.cache
def _is_in_users_file(name: str) -> bool:
    standard = name.startswith(STANDARD) and "site-packages" not in name
    return not standard and not name.startswith(LIBRARIES) and GENERATED not in name


def asked_by_users(frame: FrameType | None) -> bool:
    """Return whether the frame is the user's, or that of a torch decorator around a function that the user called."""
    while frame is not None and frame.f_code.co_filename.endswith(_DECORATORS):
        frame = frame.f_back
    return frame is not None and is_users(frame)


@functools.lru_cache(maxsize=4096)
def described(frames: tuple[tuple[CodeType, int], ...]) -> tuple[str, str]:
    """Return file:line of the innermost frame, and a stack trace of all frames as `traceback` formats it."""
    code, line = frames[0]
    return f"{code.co_filename}:{line}", "\n".join(_trace_line(*frame) for frame in reversed(frames)).strip()


def _trace_line(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    entry = f'  File "{code.co_filename}", line {line}, in {code.co_name}'
    return f"{entry}\n    {text}" if text else entry
