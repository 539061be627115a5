"""Which contract a remote call has, for a graph and for a forward that runs as written alike.

What is stated for a name comes before what the function or method declares itself. Names are
"package.module:function", "package.module:Class.method", and ".method" for any object behind an RRef.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Graph

from fxlib.runtime.ops import operators
from fxlib.runtime.ops.batches import is_item, item_of
from fxlib.runtime.ops.method_callers import class_of_method, method_sent
from fxlib.spec.contract import Contract, contract_of

Stated = Callable[[str], Contract | None]
"""Returns the contract that is stated for a name, if there is one."""


def of_function(name: str, function: Callable[..., Any], stated: Stated) -> Contract | None:
    """Return the contract of a function that is called by name."""
    return stated(name) or contract_of(function)


def of_method(kind: type | None, method: str, stated: Stated) -> Contract | None:
    """Return the contract of a method of the object behind an RRef, of the class `kind`; None: it is not known."""
    if (found := stated(f".{method}")) is not None or kind is None:
        return found
    for base in kind.__mro__:
        if method in base.__dict__:
            found = stated(f"{base.__module__}:{base.__qualname__}.{method}")
            return found or contract_of(base.__dict__[method]) or contract_of(getattr(base, method))
    return None


def of_method_called(
    method: Callable[..., Any],
    helpers: Contract | None,
    stated: Stated,
    builtin: Callable[[type, str], Contract | None] = lambda *_: None,
) -> Contract | None:
    """Return the contract of a method that a helper calls on the object behind an RRef.

    What is stated for the method comes first, then what is known of the helper, then what the method declares, and
    then what `builtin` knows of a class and the name of a method.
    """
    name, kind = method.__name__, class_of_method(method)
    found = stated(f".{name}")
    if kind is not None:
        found = stated(f"{kind.__module__}:{kind.__qualname__}.{name}") or found
    own = found or helpers or contract_of(method) or (builtin(kind, name) if kind is not None else None)
    if own is None or (found is None and own is helpers):
        return own
    # What it says of the method's arguments is not so of those that the helper is given.
    return replace(own, part=None, part_at=None, keys=None, keys_at=None, concurrent=False, batched_by=None)


def contracts_in(graph: Graph) -> dict[str, Contract]:
    """Return the contracts of the functions and methods that a graph calls, whoever declared them, by name.

    A helper that calls methods of several contracts has none itself.
    """
    found: dict[str, Contract] = {}
    helpers: dict[str, list[Contract]] = {}
    for node in graph.nodes:
        if "contract" not in node.meta:
            continue
        if node.target in {operators.remote_call, operators.issue_call}:
            function, args = node.args[1:3]
        elif is_item(node):
            function, args = item_of(node).function, item_of(node).args
        else:
            continue
        if method := method_sent(args):
            found[method] = node.meta["contract"]
            helpers.setdefault(str(function), []).append(node.meta["contract"])
        else:
            found[str(function)] = node.meta["contract"]
    alike = {name: each[0] for name, each in helpers.items() if all(one == each[0] for one in each)}
    return alike | found
