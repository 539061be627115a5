"""What no input may do, whatever a parser makes of it: run code, import, write, connect, or leave torch changed.

Python reports these as audit events. While an input is read, each of them that reading has no need of is a finding. The
only code that reading may make is that of torch.fx, of one function that calls operators, and that of guards.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlib.wire import targets as allowed

_REFUSED = (
    *("subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "socket.", "pickle.", "ctypes."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.putenv", "os.chmod", "os.kill", "shutil.", "urllib."),
    *("code.__new__", "function.__new__", "sys.addaudithook", "sys.setprofile", "sys.settrace", "marshal."),
)
_HARMLESS = frozenset({"socket.gethostname", "ctypes.seh_exception"})
_FILE = "<eval_with_key>"
_NOT_GENERATED = (
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.AsyncFunctionDef, ast.Lambda, ast.Global, ast.Nonlocal, ast.Await),
    *(ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Try, ast.While, ast.With, ast.Delete),
)
_OPERATORS = frozenset(
    name
    for name in (*(each.rpartition(".")[2] for each in allowed.functions()), *allowed.methods())
    if name[:2] == "__"
)
"""Names of operators that are spelled as Python's own methods are."""
_SECONDS = 2.0
_SECONDS_PER_BYTE = 2e-4


class ViolationError(BaseException):
    """An input did what none may do. It is no `Exception`, so that nothing on its way takes it for a bad input."""


class Watch:
    """The audit hook of this process, which is installed once, and looks on while `armed`."""

    def __init__(self) -> None:
        self.armed: int | None = None
        """The thread that reads an input, as `threading.get_ident` has it."""
        self.found: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed is None or self.armed != threading.get_ident():
            return
        problem = _problem(event, args)
        if problem:
            self.found.append(problem)


def _problem(event: str, args: tuple[Any, ...]) -> str:
    if event == "import" and args[0] not in sys.modules:
        return f"imports {args[0]}"
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wxa+"):
        return f"writes {args[0]}"
    if event == "exec" and not (args[0].co_filename.startswith(_FILE) or _makes_tuples(args[0])):
        return f"executes code of {args[0].co_filename}"
    if event == "compile":
        return _compiled(*args)
    if event.startswith(_REFUSED) and event not in _HARMLESS:
        return f"{event}{args[:1]}"[:400]
    return ""


def _compiled(source: Any, name: Any) -> str:
    if source is None or name == "<unknown>":  # a tree that was parsed before, or one that `ast.parse` makes
        return ""
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
    if name == "<string>" and _OF_A_CLASS.fullmatch(text):
        return ""
    if not str(name).startswith(_FILE):
        return f"compiles as {name}: {text[:400]!r}"
    _GENERATED.append(text)
    return ""


_GENERATED: list[str] = []
_OF_A_CLASS = re.compile(r"lambda _cls, ([\w, ]*): _tuple_new\(_cls, \(([\w, ]*)\)\)")
"""What Python's own `namedtuple` compiles, of the names of fields alone."""


def _makes_tuples(code: CodeType) -> bool:
    inner = code.co_consts[0] if code.co_consts else None
    return (
        code.co_filename == "<string>"
        and isinstance(inner, CodeType)
        and inner.co_freevars + inner.co_names == ("_tuple_new",)
    )


def _injected(source: str) -> str:
    """Say what in the code that torch.fx generated is none of the graph's calls."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # nothing of it runs
        return ""
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != "forward":
        return f"generates more than a forward: {source[:400]!r}"
    for each in ast.walk(body[0]):
        if isinstance(each, _NOT_GENERATED) or (isinstance(each, ast.FunctionDef) and each is not body[0]):
            return f"generates a {type(each).__name__}: {source[:400]!r}"
        if isinstance(each, ast.Attribute) and each.attr.startswith("__") and each.attr not in _OPERATORS:
            return f"generates an access to {each.attr}: {source[:400]!r}"
    return ""


def _state() -> dict[str, object]:
    """Return what of this process belongs to the one who reads, and to no input."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "generator": torch.default_generator.get_state().numpy().tobytes(),
        "containers of pytree": len(pytree.SUPPORTED_NODES),
        "path": tuple(sys.path),
        "folder": os.getcwd(),  # noqa: PTH109 - as a string, for comparison
        "filters of warnings": len(warnings.filters),
        "recursion limit": sys.getrecursionlimit(),
    }


@contextmanager
def undisturbed(watch: Watch, size: int) -> Iterator[None]:
    """Read an input of so many bytes within this context.

    Raises:
        ViolationError: reading it did what none may do.
    """
    watch.found.clear()
    _GENERATED.clear()
    before, threads, began_s = _state(), set(threading.enumerate()), time.thread_time()
    watch.armed = threading.get_ident()
    try:
        yield
    finally:
        watch.armed = None
    taken_s = time.thread_time() - began_s
    found = [*watch.found, *filter(None, map(_injected, _GENERATED))]
    after = _state()
    found += [f"changes the {name}" for name, value in before.items() if after[name] != value]
    found += [f"starts the thread {each.name}" for each in set(threading.enumerate()) - threads]
    if taken_s > _SECONDS + size * _SECONDS_PER_BYTE:
        found.append(f"takes {taken_s:.1f} s of processor time for {size:,} bytes")
    if found:
        raise ViolationError("; ".join(found))


def attempt(read: Callable[[bytes], object], data: bytes, refusals: tuple[type[Exception], ...], watch: Watch) -> bool:
    """Read an input, and return whether it was taken.

    Raises:
        ViolationError: it did what none may do.
        Exception: it was refused by an exception that nobody has promised.
    """
    with undisturbed(watch, len(data)):
        try:
            read(data)
        except refusals:
            return False
    return True
