"""Imports and calls functions that the user names on the command line as "pkg.mod:function"."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fxlib.errors import FxlibError


def called(name: str, where: str, hint: str) -> Any:
    """Import a function, call it without arguments, and return what it returns.

    Raises:
        FxlibError: the name has another form, or there is no such function; `where` names the argument. Exceptions
            of the function itself are passed on.
    """
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise FxlibError(f"{name!r} is not of the form pkg.mod:function", where=where.partition(" ")[0], hint=hint)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)  # named by the user, on their own command line
    except ModuleNotFoundError as error:
        raise FxlibError(str(error), where=where, hint=hint) from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise FxlibError(f"{module_name} has no {function!r}", where=where, hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise FxlibError(f"{function!r} is no function", where=where, hint=hint)
    return found()
