"""Find the contract of a remote call, in a graph as well as in a forward that runs as written.

A contract that is stated for a name comes before the one that the function or method itself declares. Names are
"package.module:function", "package.module:Class.method", and ".method" for any object behind an RRef.

Most RPC programs have helpers that call a method of the object behind an RRef.
`rpc_sync(rref.owner(), call_method, args=[Table.rows, rref, rows])` is a call of `call_method`, and does what
`Table.rows` does: so it has that method's contract, and not one that all methods share. A helper is recognized by its
code alone, which has to have one of the forms below, whatever names it uses; one that does more is a function like any
other.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch.distributed import rpc
from torch.fx import Graph, Node, Proxy

from fxlib.runtime import functions
from fxlib.runtime.ops import operators
from fxlib.runtime.ops.registry import is_item, item_of
from fxlib.spec.contract import Contract, contract_of

_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
GIVEN = 2
"""The number of arguments that a helper takes before those of the method: the method and the RRef."""
Stated = Callable[[str], Contract | None]
"""A function that returns the contract that is stated for a name, if there is one."""


class _Code:
    """Holds the way to a function's code; a capture, which instruments functions for a while, knows the original."""

    of: Callable[[FunctionType], CodeType] = operator.attrgetter("__code__")


def ask_for_code(of: Callable[[FunctionType], CodeType]) -> None:
    """Recognize helpers by the code that `of` returns."""
    _Code.of = staticmethod(of)


class MethodCall(NamedTuple):
    """A method call that a helper makes."""

    method: Callable[..., Any]
    rref: Any
    args: tuple[Any, ...]


def method_called(function: Callable[..., Any], args: tuple[Any, ...]) -> MethodCall | None:
    """Return the method call that `function` makes with these arguments; None if it does more than that."""
    if len(args) < GIVEN or not isinstance(function, FunctionType) or _shape(_Code.of(function)) not in _KNOWN:
        return None
    method, rref, *rest = args
    if not isinstance(method, FunctionType) or not isinstance(rref, (rpc.PyRRef, Proxy)):
        return None
    return MethodCall(method, rref, tuple(rest))


def method_sent(args: object) -> str:
    """Return the name of the method that a graph's call hands to a helper; empty if its first argument is no method."""
    first = args[0] if isinstance(args, tuple) and args else None
    return str(first.args[0]) if isinstance(first, Node) and first.target is functions.resolve else ""


def class_of_method(method: Callable[..., Any]) -> type | None:
    """Return the class in whose body a method was written; None if it is not found, or has another method now."""
    *path, name = method.__qualname__.split(".")
    found: Any = inspect.getmodule(method)
    for each in path:
        found = getattr(found, each, None)
    return found if isinstance(found, type) and found.__dict__.get(name) is method else None


def _shape(code: CodeType) -> tuple[object, ...]:
    """Return the properties that decide what code does with its arguments: not their names, nor its docstring."""
    constants = tuple(each for each in code.co_consts if each is not None and not isinstance(each, str))
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS)
    return (code.co_code, code.co_names, code.co_freevars, code.co_exceptiontable, constants, counts)


def _with_keywords(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def _without_keywords(method: Any, rref: Any, *args: Any) -> Any:
    return method(rref.local_value(), *args)


def _named_first(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    self = rref.local_value()
    return method(self, *args, **kwargs)


def _result_named(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(rref.local_value(), *args, **kwargs)
    return result  # noqa: RET504 - programs write it in this form


_KNOWN = frozenset(_shape(each.__code__) for each in (_with_keywords, _without_keywords, _named_first, _result_named))


def of_function(name: str, function: Callable[..., Any], stated: Stated) -> Contract | None:
    """Return the contract of a function that is called by name."""
    return stated(name) or contract_of(function)


def of_method(kind: type | None, method: str, stated: Stated) -> Contract | None:
    """Return the contract of a method of the object behind an RRef, of class `kind`; None if it is not known."""
    if (found := stated(f".{method}")) is not None or kind is None:
        return found
    for base in kind.__mro__:
        if method in base.__dict__:
            found, own = stated(f"{base.__module__}:{base.__qualname__}.{method}"), base.__dict__[method]
            if isinstance(own, FunctionType):
                own = MethodType(own, kind)  # a call gives it no object: that is behind the RRef
            return found or contract_of(own) or contract_of(getattr(base, method))
    return None


def of_method_called(
    method: Callable[..., Any],
    helpers: Contract | None,
    stated: Stated,
    builtin: Callable[[type, str], Contract | None] = lambda *_: None,
) -> Contract | None:
    """Return the contract of a method that a helper calls on the object behind an RRef.

    The contract that is stated for the method comes first, then the helper's, then the one that the method declares,
    and then the one that `builtin` has for a class and the name of a method.
    """
    name, kind = method.__name__, class_of_method(method)
    found = stated(f".{name}")
    if kind is not None:
        found = stated(f"{kind.__module__}:{kind.__qualname__}.{name}") or found
    own = found or helpers or contract_of(method) or (builtin(kind, name) if kind is not None else None)
    if own is None or (found is None and own is helpers):
        return own
    # The contract's statements about the method's arguments do not hold for the arguments of the helper.
    return replace(
        own,
        part=None,
        part_at=None,
        keys=None,
        keys_at=None,
        concurrent=False,
        batched_by=None,
        with_state=None,
        update=None,
    )


def contracts_in(graph: Graph) -> dict[str, Contract]:
    """Return the contracts of the functions and methods that a graph calls, whoever declared them, by name.

    A helper that calls methods with different contracts has none itself.
    """
    found: dict[str, Contract] = {}
    helpers: dict[str, list[Contract]] = {}
    for function, method, contract in _called(graph):
        found[method or function] = contract
        if method:
            helpers.setdefault(function, []).append(contract)
    alike = {name: each[0] for name, each in helpers.items() if all(one == each[0] for one in each)}
    return alike | found


def contracts_by_name(graph: Graph) -> dict[str, Contract]:
    """Return those of these contracts that hold for a function or method wherever it is called.

    What is known of a helper holds for the methods that the graph gives to it, and what is known of ".method" for the
    graph's own RRefs.
    """
    found = {method or function: contract for function, method, contract in _called(graph)}
    helpers = {function for function, method, _ in _called(graph) if method}
    return {name: contract for name, contract in found.items() if name not in helpers and not name.startswith(".")}


def _called(graph: Graph) -> Iterator[tuple[str, str, Contract]]:
    """Yield for each call with a contract the function, the method that it is given if it is a helper, and that."""
    for node in graph.nodes:
        if "contract" not in node.meta:
            continue
        if node.target in {operators.remote_call, operators.issue_call}:
            yield str(node.args[1]), method_sent(node.args[2]), node.meta["contract"]
        elif is_item(node):
            item = item_of(node)
            yield item.function, method_sent(item.args), node.meta["contract"]
