"""The kinds of calls that can be issued and waited for: what may be scheduled, and by which operators.

A call is more general than RPC. Anything with a blocking form and a pair of operators (issue, wait) with the same
meaning is scheduled by the same machinery once it is registered here. `fxlib.register_call` does so for a client of
the user's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.node import has_side_effect

from fxlib.contracts import Contract
from fxlib.errors import ContractError
from fxlib.runtime import batches, collectives, ops

Operator = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """One kind of call: `blocking(*args) == wait(issue(*args))`, with the same effects and errors.

    `issue` takes the arguments of `blocking`, does not block, and keeps its errors for `wait`, which takes what
    `issue` returned. Several kinds may share one `wait`. `start`, if there is one, is the issue that programs write
    themselves: it raises at once. A kind without `blocking` is one that passes make: of several calls, say, that are
    issued as one and waited for one by one. All are module-level functions.
    """

    name: str
    blocking: Operator | None
    issue: Operator
    wait: Operator
    start: Operator | None = None
    contract: Contract | None = None
    """Of a client of the user's own: what its calls do. A call of `torch.distributed.rpc` has its function's."""
    to: str | None = None
    """Of a client of the user's own: the argument that says whom a call reaches."""
    is_client: bool = False
    """Whether it is a client of the user's own."""

    @property
    def function(self) -> str:
        """Name of the blocking function, "package.module:qualname"; empty if there is none."""
        return "" if self.blocking is None else f"{self.blocking.__module__}:{self.blocking.__qualname__}"

    def destination(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument that says whom a call of a client reaches; None if there is none."""
        if self.to is None or self.blocking is None:
            return None
        bound = signature_of(self.blocking).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[self.to]

    def reached(self, node: Node) -> str:
        """Return in words whom a call of a client reaches, as far as its node tells: a handle by its attribute."""
        to = self.destination(node.args, node.kwargs)
        if isinstance(to, Node) and to.op == "get_attr":
            return str(to.target)
        return self.name if to is None else str(to)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators of the kind."""
        return tuple(each for each in (self.blocking, self.issue, self.wait, self.start) if each is not None)


@functools.cache
def signature_of(function: Operator) -> inspect.Signature:
    """Return a client function's signature: as it is when first asked for, whatever a capture puts in its place."""
    return inspect.signature(function)


_KINDS: list[CallKind] = []
_BLOCKING: dict[Operator, CallKind] = {}
_ISSUE: dict[Operator, CallKind] = {}
_WAIT: set[Operator] = set()


def register(kind: CallKind) -> CallKind:
    """Make a kind known. Its operators count as effects, so that nothing deletes a call whose result is unused.

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


def kinds() -> tuple[CallKind, ...]:
    """All registered kinds."""
    return tuple(_KINDS)


def kind_of(node: Node) -> CallKind | None:
    """Return the kind of a call, of its issue, or of its wait; None for any other node."""
    if node.op != "call_function":
        return None
    if is_wait(node):
        issue = node.args[0] if node.args else None
        found = _ISSUE.get(issue.target) if isinstance(issue, Node) and is_issue(issue) else None  # type: ignore[arg-type]
        return found or next(kind for kind in _KINDS if kind.wait is node.target)
    return _BLOCKING.get(node.target) or _ISSUE.get(node.target)  # type: ignore[arg-type]


def client_of(node: Node) -> CallKind | None:
    """Return the kind of a call, an issue or a wait of a client of the user's own; None for any other node."""
    kind = kind_of(node)
    return kind if kind is not None and kind.is_client else None


def is_call(node: Node) -> bool:
    """Whether the node is a call in its blocking form."""
    return node.op == "call_function" and node.target in _BLOCKING


def is_issue(node: Node) -> bool:
    """Whether the node issues a call."""
    return node.op == "call_function" and node.target in _ISSUE


def is_wait(node: Node) -> bool:
    """Whether the node waits for a call."""
    return node.op == "call_function" and node.target in _WAIT


REMOTE_CALL = register(
    CallKind(name="rpc", blocking=ops.remote_call, issue=ops.issue_call, wait=ops.wait, start=ops.start_call)
)
FETCH = register(CallKind(name="rref", blocking=ops.fetch, issue=ops.issue_fetch, wait=ops.wait))
COLLECTIVE = register(
    CallKind(
        name="collective",
        blocking=collectives.collective,
        issue=collectives.issue_collective,
        wait=collectives.wait_collective,
    )
)
BATCH = register(CallKind(name="batch", blocking=None, issue=batches.issue_batch, wait=batches.wait_item))
has_side_effect(ops.create)
for _tracker in (ops.track_gradient, ops.send_gradient):
    has_side_effect(_tracker)
