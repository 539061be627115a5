"""Names of remote functions, and the way back from a name to the function.

A graph never holds a function, only its name "package.module:qualname", as on the wire of `torch.distributed.rpc`.
Names resolve through tables alone: functions marked with `@fxlib.remote`, functions that capture met, torch's own,
and the modules that an operator allowed. No name in a graph causes an import or a walk along attributes.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from fxlib.errors import ContractError
from fxlib.spec import contract

RemoteFunction = Callable[..., Any]

_TABLE: dict[str, RemoteFunction] = {}
_BUILTINS = ("abs", "divmod", "len", "max", "min", "pow", "round", "sorted", "sum")
_CONSTRUCTORS = (
    *("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros"),
)
_TENSOR_METHODS_WITHHELD = frozenset(
    {
        *("apply_", "map_", "map2_", "module_load", "numpy", "pin_memory", "register_hook", "share_memory_"),
        *("register_post_accumulate_grad_hook", "requires_grad_", "set_", "storage", "untyped_storage", "data_ptr"),
    }
)


def register(function: RemoteFunction, name: str | None = None) -> str:
    """Let `name` (by default the function's own) resolve to the function; return the name.

    Raises:
        ContractError: the function has no name by which another process could find it.
    """
    name = name_of(function) if name is None else name
    _TABLE[name] = function
    return name


def name_of(function: RemoteFunction) -> str:
    """Return "package.module:qualname" of a function, builtin, static or class method, class or torch function.

    Raises:
        ContractError: the function is a lambda, is local to another function, or is not the one that its name leads to.
    """
    if (torch_name := _torch_names().get(table_key(function))) is not None:
        return torch_name
    owner = getattr(function, "__self__", None)
    if inspect.ismethod(function) and isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{function.__name__}"
    if isinstance(function, torch.jit.ScriptFunction):  # it keeps the name of the function that it was made from
        home, _, script = str(function.qualified_name).removeprefix("__torch__.").rpartition(".")
        return f"{home or '__main__'}:{script}"
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise ContractError(
            f"{function!r} has no name by which another process could find it",
            hint="Make it a function at the top level of a module that the servers import, too.",
        )
    if "<" in qualname:
        raise ContractError(
            f"{qualname!r} of {module!r} is a lambda or local to another function, so no other process can find it",
            hint="Define it at the top level of a module that the servers import, too.",
        )
    _check_reachable(function, module, qualname)
    return f"{module}:{qualname}"


def resolve(name: str) -> RemoteFunction:
    """Return the function called `name`.

    Raises:
        ContractError: no table holds the name in this process.
    """
    function = _TABLE.get(name) or contract.declared(name)
    if function is None and name.startswith(("torch", "_operator:", "builtins:")):
        function = _own_functions().get(name)
    if function is None:
        raise ContractError(
            f"no remote function {name!r} is known in this process",
            hint="Import the module that marks it with @fxlib.remote, register it with "
            "fxlib.runtime.functions.register, or have the operator allow its module.",
        )
    return function


def meet(name: str) -> RemoteFunction:
    """Let a function resolve that one of this process's own contracts names, and return it.

    Never call this with a name that a request or a graph brought.

    Raises:
        ContractError: none of the modules that this process has imported has the function.
    """
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if name not in _TABLE and callable(found):
        register(found, name)
    return resolve(name)


def allow_module(name: str) -> tuple[str, ...]:
    """Import the module `name` and let the functions, classes and methods that it defines resolve; return their names.

    The operator names the module at start-up. Never call this with a name that a request brought.

    Raises:
        ContractError: there is no such module.
    """
    try:
        module = importlib.import_module(name)  # the operator named it at start-up
    except ImportError as error:
        raise ContractError(f"cannot import {name!r}: {error}", hint="Is it on this process's PYTHONPATH?") from error
    found = dict(_defined_in(module))
    _TABLE.update(found)
    return tuple(found)


def table_key(function: object) -> object:
    """Return the key of a function in a table: the function, or its identity if it cannot be hashed.

    The identity alone would not do: a builtin method of a type (`torch.add`) is a new object at each access, equal to
    the one before.
    """
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


def _defined_in(module: ModuleType) -> Iterator[tuple[str, RemoteFunction]]:
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or getattr(value, "__module__", None) != module.__name__ or not callable(value):
            continue
        yield f"{module.__name__}:{attribute}", value
        if isinstance(value, type):
            for method in vars(value):
                bound = getattr(value, method)
                if not method.startswith("_") and inspect.isroutine(bound):
                    yield f"{module.__name__}:{attribute}.{method}", bound


def _check_reachable(function: RemoteFunction, module: str, qualname: str) -> None:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is None or found is function or getattr(found, "__wrapped__", None) is function:
        return  # absent: a module that is still being imported; wrapped: torch.fx.wrap during a trace
    if getattr(found, "__qualname__", None) != qualname or getattr(function, "__func__", function) is not found:
        raise ContractError(
            f"{module}:{qualname} is no longer the function that carries this name, so other processes would call "
            "another one",
            hint="Give the function a name of its own, or keep its decorator from renaming it.",
        )


@functools.cache
def _own_functions() -> dict[str, RemoteFunction]:
    """Return the functions of torch, operator and builtins that may be called on a server, by exact name."""
    table: dict[str, RemoteFunction] = {f"builtins:{name}": getattr(builtins, name) for name in _BUILTINS}
    table |= {f"_operator:{name}": getattr(operator, name) for name in dir(operator) if _is_plain(name)}
    overridable = torch.overrides.get_overridable_functions()
    for namespace, module in ((torch, "torch"), (torch.nn.functional, "torch.nn.functional")):
        allowed = {getattr(function, "__name__", "") for function in overridable[namespace]}
        table |= {f"{module}:{name}": getattr(namespace, name) for name in allowed if hasattr(namespace, name)}
    table |= {f"torch:{name}": getattr(torch, name) for name in _CONSTRUCTORS}
    methods = {getattr(function, "__name__", "") for function in overridable[torch.Tensor]}
    for name in methods - _TENSOR_METHODS_WITHHELD:
        if not name.startswith("_") and inspect.isroutine(getattr(torch.Tensor, name, None)):
            table[f"torch:Tensor.{name}"] = getattr(torch.Tensor, name)
    return {name: function for name, function in table.items() if not isinstance(function, type)}


def _is_plain(name: str) -> bool:
    return not name.startswith("_") and name not in {"attrgetter", "itemgetter", "methodcaller", "call"}


@functools.cache
def _torch_names() -> dict[object, str]:
    names: dict[object, str] = {}
    for name, function in _own_functions().items():
        names.setdefault(table_key(function), name)
    return names
