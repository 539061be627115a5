"""The kinds of calls that can be issued and waited for, and so scheduled, with their operators.

A call is more general than RPC. Anything with a blocking form and a pair of operators (issue, wait) of the same
meaning is scheduled by the same machinery once it is registered here. `fxlib.register_call` registers a blocking client
of the user's own, with the pair of functions that does the same without blocking.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from torch.fx import Node
from torch.fx.node import has_side_effect

from fxlib.errors import ContractError, OpaqueError
from fxlib.runtime.ops import batches, collectives, operators
from fxlib.spec.contract import Contract, contract_of

Operator = Callable[..., Any]
_TAKEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """One kind of call: `blocking(*args) == wait(issue(*args))`, with the same effects and errors.

    `issue` takes the arguments of `blocking`, does not block, and keeps its errors for `wait`, which takes the result
    of `issue`. Several kinds may share one `wait`. `start`, if there is one, is the issue that programs write
    themselves: it raises at once. Passes make the kinds without `blocking`, such as several calls that are issued as
    one and waited for one by one. All are module-level functions.
    """

    name: str
    blocking: Operator | None
    issue: Operator
    wait: Operator
    start: Operator | None = None
    contract: Contract | None = None
    """The contract of calls of a user's own client; a call of `torch.distributed.rpc` has its function's contract."""
    to: str | None = None
    """The argument that names the server which a call of a user's own client reaches."""
    is_client: bool = False
    """Whether the kind is a user's own client."""

    @property
    def function(self) -> str:
        """The name of the blocking function, "package.module:qualname"; empty if there is none."""
        if isinstance(self.blocking, ClientFunction):
            return self.blocking.client.function
        return "" if self.blocking is None else f"{self.blocking.__module__}:{self.blocking.__qualname__}"

    def destination(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument that names the server which a call of a client reaches; None if there is none."""
        if self.to is None or self.blocking is None:
            return None
        bound = signature_of(self.blocking).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[self.to]

    def reached(self, node: Node) -> str:
        """Return in words which server a client's call reaches, as far as its node tells; a handle by its attribute."""
        to = self.destination(node.args, node.kwargs)
        if isinstance(to, Node) and to.op == "get_attr":
            return str(to.target)
        return self.name if to is None else str(to)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators of the kind."""
        return tuple(each for each in (self.blocking, self.issue, self.wait, self.start) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The description of a user's own client, for processes that lack its code.

    Attributes:
        name: the client's name in reports.
        function: the function that blocks, "package.module:qualname".
        labels: the names of its functions on the wire: blocking, issue, wait.
        parameters: the parameters of the first two: name, kind, whether there is a default, and the default if it is a
            text.
        to: the parameter that names the server which a call reaches.
    """

    name: str
    function: str
    labels: tuple[str, str, str]
    parameters: tuple[tuple[str, int, bool, str], ...]
    to: str | None

    @classmethod
    def of(cls, kind: CallKind) -> Client:
        """Return the description of a registered client, or of one that is known only by its description."""
        if isinstance(kind.blocking, ClientFunction):
            return kind.blocking.client
        assert kind.blocking is not None  # noqa: S101 - clients have one
        blocking, issue, wait = (f"{each.__module__}.{each.__qualname__}" for each in kind.operators)
        parameters = signature_of(kind.blocking).parameters.values()
        return cls(
            name=kind.name,
            function=kind.function,
            labels=(blocking, issue, wait),
            parameters=tuple(
                (
                    each.name,
                    int(each.kind),
                    each.default is not each.empty,
                    each.default if isinstance(each.default, str) else "",
                )
                for each in parameters
            ),
            to=kind.to,
        )

    @property
    def kind(self) -> CallKind:
        """The kind of the client's calls, with stand-ins for its functions."""
        blocking, issue, wait = (ClientFunction(self, place) for place in range(len(self.labels)))
        return CallKind(name=self.name, blocking=blocking, issue=issue, wait=wait, to=self.to, is_client=True)


class ClientFunction:
    """Stands in a graph for a function of a client whose code this process lacks; stand-ins for the same are equal.

    Args:
        client: the client.
        place: the index of the function: 0 blocks, 1 issues, 2 waits.
    """

    def __init__(self, client: Client, place: int) -> None:
        self.client = client
        self.place = place
        # Generated code of torch.fx names a function by these.
        self.__name__ = self.__qualname__ = f"client_{re.sub(r'[^0-9A-Za-z_]', '_', self.label)}"

    @property
    def label(self) -> str:
        """The name of the function on the wire."""
        return self.client.labels[self.place]

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of the function, with the defaults that are texts; None stands for any other default."""
        return inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect._ParameterKind(kind), default=(text or None) if has_default else inspect._empty
                )
                for name, kind, has_default, text in self.client.parameters
            ]
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the call.

        Raises:
            OpaqueError: always.
        """
        raise OpaqueError(
            f"function {self.label!r} of the client {self.client.name!r} is not registered in this process",
            hint="Import the module that registers it.",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientFunction) and (self.client, self.place) == (other.client, other.place)

    def __hash__(self) -> int:
        return hash((self.label, self.place))

    def __deepcopy__(self, memo: object) -> ClientFunction:
        return self


@functools.cache
def signature_of(function: Operator) -> inspect.Signature:
    """Return a client function's signature as it was on the first request, whatever a capture puts in its place."""
    return inspect.signature(function)


_KINDS: list[CallKind] = []
_BLOCKING: dict[Operator, CallKind] = {}
_ISSUE: dict[Operator, CallKind] = {}
_WAIT: set[Operator] = set()


def register(kind: CallKind) -> CallKind:
    """Register a kind. Its operators count as effects, so that nothing deletes a call whose result is unused.

    Raises:
        ContractError: one of its operators already plays another part.
    """
    issues = tuple(each for each in (kind.issue, kind.start) if each is not None)
    blocking = () if kind.blocking is None else (kind.blocking,)
    tables = [(_ISSUE, each, (_BLOCKING, _WAIT)) for each in issues]
    tables += [(_BLOCKING, each, (_ISSUE, _WAIT)) for each in blocking]
    for table, key, others in tables:
        if table.get(key, kind) != kind or any(key in other for other in others):
            raise ContractError("the operator already belongs to another kind of call", where=f"{kind.name}: {key!r}")
    if kind.wait in _BLOCKING or kind.wait in _ISSUE:
        raise ContractError("the operator already belongs to another kind of call", where=f"{kind.name}: {kind.wait!r}")
    if kind not in _KINDS:
        _KINDS.append(kind)
    _BLOCKING.update(dict.fromkeys(blocking, kind))
    _ISSUE.update(dict.fromkeys(issues, kind))
    _WAIT.add(kind.wait)
    for each in kind.operators:
        has_side_effect(each)
    return kind


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
    return register(kind)


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


def kinds() -> tuple[CallKind, ...]:
    """Return all registered kinds."""
    return tuple(_KINDS)


def kind_of(node: Node) -> CallKind | None:
    """Return the kind of a call, of its issue, or of its wait; None for any other node."""
    if node.op != "call_function":
        return None
    if is_wait(node):
        issue = node.args[0] if node.args else None
        if isinstance(node.target, ClientFunction):  # several clients may share one wait
            known = issue.target if isinstance(issue, Node) and is_issue(issue) else None
            return (known if isinstance(known, ClientFunction) else node.target).client.kind
        found = _ISSUE.get(issue.target) if isinstance(issue, Node) and is_issue(issue) else None  # type: ignore[arg-type]
        return found or next(kind for kind in _KINDS if kind.wait is node.target)
    if isinstance(node.target, ClientFunction):
        return node.target.client.kind
    return _BLOCKING.get(node.target) or _ISSUE.get(node.target)  # type: ignore[arg-type]


def client_of(node: Node) -> CallKind | None:
    """Return the kind of a call, an issue or a wait of a user's own client; None for any other node."""
    kind = kind_of(node)
    return kind if kind is not None and kind.is_client else None


def is_call(node: Node) -> bool:
    """Return whether the node is a call in its blocking form."""
    return node.op == "call_function" and (node.target in _BLOCKING or _stands_for(node.target, 0))


def is_issue(node: Node) -> bool:
    """Return whether the node issues a call."""
    return node.op == "call_function" and (node.target in _ISSUE or _stands_for(node.target, 1))


def is_wait(node: Node) -> bool:
    """Return whether the node waits for a call."""
    return node.op == "call_function" and (node.target in _WAIT or _stands_for(node.target, 2))


def completes(node: Node) -> bool:
    """Return whether the node is the wait of the kind whose issue it takes, and takes no other value."""
    if not is_wait(node) or not node.args or node.kwargs:
        return False
    issue = node.args[0]
    if not isinstance(issue, Node) or not is_issue(issue) or (kind := kind_of(issue)) is None:
        return False
    if kind.is_client and len(issue.users) != 1:  # a client's answer may be waited for only once
        return False
    return kind.wait == node.target and len(node.args) == (2 if kind is BATCH else 1)


def _stands_for(target: object, place: int) -> bool:
    return isinstance(target, ClientFunction) and target.place == place


REMOTE_CALL = register(
    CallKind(
        name="rpc",
        blocking=operators.remote_call,
        issue=operators.issue_call,
        wait=operators.wait,
        start=operators.start_call,
    )
)
FETCH = register(CallKind(name="rref", blocking=operators.fetch, issue=operators.issue_fetch, wait=operators.wait))
COLLECTIVE = register(
    CallKind(
        name="collective",
        blocking=collectives.collective,
        issue=collectives.issue_collective,
        wait=collectives.wait_collective,
    )
)
BATCH = register(CallKind(name="batch", blocking=None, issue=batches.issue_batch, wait=batches.wait_item))
