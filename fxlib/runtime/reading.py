"""What a model's Python may read while its forward runs, told from its code: names, and tests for None, True, False.

A trace fixes what Python itself decides. These are the decisions that a run can watch: attributes by their names, and
arguments that are None or a bool where the trace saw a placeholder for a tensor.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Reading:
    """All code that a forward may reach by name: methods of the model's classes, and functions of their modules."""

    names: frozenset[str] = frozenset()
    """Every name that it reads; not attributes that it assigns, which capture refuses."""
    singletons: tuple[type, ...] = ()
    """Types of the singletons that it compares with by identity: those of None, and of True and False."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Reading:
        """Read the code behind the forwards of `modules`; torch's own is left out, as it is not traced through."""
        modules = list(modules)
        methods: dict[str, set[FunctionType]] = {}
        for kind in {base for module in modules for base in type(module).__mro__ if _is_users(base.__module__)}:
            for name, value in vars(kind).items():
                methods.setdefault(name, set()).update(_functions(value))
        names: set[str] = set()
        codes: list[CodeType] = []
        todo, seen = list(methods.get("forward", ())), set[FunctionType]()
        for module in modules:
            todo += _functions(module.__dict__.get("forward"))
        while todo:
            if (function := todo.pop()) in seen:
                continue
            seen.add(function)
            for code in _nested(function.__code__):
                codes.append(code)
                names.update(code.co_names)
                for name in set(code.co_names) - {"__init__"}:
                    todo += methods.get(name, ())
                    todo += _globals(function, name, code.co_names)
        found = {kind for code in codes for kind in _singletons(code)}
        return cls(frozenset(names.difference(*map(_assigned, codes))), tuple(found))


def _functions(value: Any) -> Iterator[FunctionType]:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, FunctionType) and _is_users(value.__module__):
        yield value


def _globals(function: FunctionType, name: str, names: Iterable[str]) -> Iterator[FunctionType]:
    value = function.__globals__.get(name)
    if isinstance(value, ModuleType) and _is_users(value.__name__):
        for each in names:
            yield from _functions(vars(value).get(each))
    else:
        yield from _functions(value)


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in ("torch", "builtins", "fxlib", "")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _assigned(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def _singletons(code: CodeType) -> Iterator[type]:
    before: Any = ...
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith(("_NONE", "_NOT_NONE")) and "JUMP" in instruction.opname:
            yield type(None)
        elif instruction.opname == "IS_OP":
            # The other side is a variable's, where it is no constant: it may hold any of them.
            yield from (type(None), bool) if before is ... else (type(before),)
        before = instruction.argval if instruction.opname == "LOAD_CONST" else ...
