"""Blocking clients of the user's own, registered with the pair of functions that does the same without blocking."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from fxlib.errors import ContractError
from fxlib.runtime.ops import calls
from fxlib.runtime.ops.calls import CallKind, signature_of
from fxlib.spec.contract import Contract, contract_of

_TAKEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def register_call(
    *,
    name: str,
    blocking: Callable[..., Any],
    issue: Callable[..., Any],
    wait: Callable[[Any], Any],
    contract: Contract | None = None,
    to: str | None = None,
) -> CallKind:
    """Let fxlib schedule the calls of a blocking client, as it does those of `torch.distributed.rpc`.

    `blocking(...)` and `wait(issue(...))` must do and raise the same. `issue` takes the arguments of `blocking` and
    returns at once; it may read its tensors at any moment until the wait, with several calls in flight. `wait` is
    called once for each issue, in any order. All three are functions at the top level of a module, and are best
    registered where they are defined: a model that is captured later has one node for each call, under whatever name
    it is called.

    `blocking` and `issue` must not write to an argument, other than a tensor, that the program reads afterwards.
    `issue` may read such arguments, too, at any moment until the wait: a forward that changes one before is refused.

    >>> register_call(
    ...     name="feature store",
    ...     blocking=client.get,
    ...     issue=client.get_later,
    ...     wait=client.join,
    ...     contract=Contract(reads="features"),
    ...     to="host",
    ... )

    Args:
        name: the client's name in reports.
        blocking: the function that models call.
        issue: the function that starts the call.
        wait: the function that takes what `issue` returned, and returns the call's result or raises its error.
        contract: what a call does to the state behind the client; by default what `@fxlib.remote` declares on
            `blocking`. Without one, a call keeps its order with every other effect.
        to: the argument of `blocking` that names the server which a call reaches; without it, a call may reach any.

    Raises:
        ContractError: the functions do not belong together, or play another part already.
    """
    _check_pair(name, blocking, issue, wait, to)
    contract = contract_of(blocking) if contract is None else contract
    if contract is not None and (contract.gradient is not None or contract.batched_by is not None):
        raise ContractError(
            "gradient= and batched_by= name remote functions, and this client calls none by its name",
            where=f"{name}: contract",
            hint="Leave them out.",
        )
    kind = CallKind(name=name, blocking=blocking, issue=issue, wait=wait, contract=contract, to=to, is_client=True)
    return calls.register(kind)


def _check_pair(
    name: str, blocking: Callable[..., Any], issue: Callable[..., Any], wait: Callable[[Any], Any], to: str | None
) -> None:
    for role, function in (("blocking", blocking), ("issue", issue), ("wait", wait)):
        _check_function(name, role, function)
    if _parameters(blocking) != _parameters(issue):
        raise ContractError(
            f"issue{signature_of(issue)} does not take the arguments of blocking{signature_of(blocking)}",
            where=name,
            hint="Give both the same parameters, with the same defaults.",
        )
    if to is not None and to not in signature_of(blocking).parameters:
        raise ContractError(f"blocking has no parameter {to!r}", where=f"{name}: to")


def _check_function(name: str, role: str, function: object) -> None:
    if not isinstance(function, FunctionType) or "." in function.__qualname__ or "<" in function.__qualname__:
        raise ContractError(
            f"{function!r} is no Python function at the top level of a module",
            where=f"{name}: {role}",
            hint="Write one that calls it: generated code, and other processes, find functions by their names.",
        )
    if role == "wait" and not _takes_one(function):
        raise ContractError("wait takes one argument: what issue returned", where=f"{name}: wait")


def _parameters(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    return [(each.name, each.kind, each.default) for each in signature_of(function).parameters.values()]


def _takes_one(function: FunctionType) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    needed = [each for each in parameters if each.default is each.empty]
    return bool(parameters) and parameters[0].kind in _TAKEN and len(needed) <= 1
