"""The kinds of calls that can be issued and waited for: what may be scheduled, and by which operators.

A call is more general than RPC. Anything with a blocking form and a pair of operators (issue, wait) with the same
meaning is scheduled by the same machinery once it is registered here:

>>> register(CallKind(name="my client", blocking=client.get, issue=client.get_later, wait=client.join))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.node import has_side_effect

from fxlib.errors import ContractError
from fxlib.runtime import ops

Operator = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """One kind of call: `blocking(*args) == wait(issue(*args))`, with the same effects and errors.

    `issue` takes the arguments of `blocking`, does not block, and keeps its errors for `wait`, which takes what
    `issue` returned. Several kinds may share one `wait`. `start`, if there is one, is the issue that programs write
    themselves: it raises at once. All are module-level functions.
    """

    name: str
    blocking: Operator
    issue: Operator
    wait: Operator
    start: Operator | None = None

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators of the kind."""
        return (self.blocking, self.issue, self.wait, *(() if self.start is None else (self.start,)))


_BLOCKING: dict[Operator, CallKind] = {}
_ISSUE: dict[Operator, CallKind] = {}
_WAIT: set[Operator] = set()


def register(kind: CallKind) -> CallKind:
    """Make a kind known. Its operators count as effects, so that nothing deletes a call whose result is unused.

    Raises:
        ContractError: one of its operators already plays another part.
    """
    issues = kind.operators[1:2] + kind.operators[3:]
    tables = [(_BLOCKING, kind.blocking, (_ISSUE, _WAIT)), *((_ISSUE, each, (_BLOCKING, _WAIT)) for each in issues)]
    for table, key, others in tables:
        if table.get(key, kind) != kind or any(key in other for other in others):
            raise ContractError("the operator already belongs to another kind of call", where=f"{kind.name}: {key!r}")
    if kind.wait in _BLOCKING or kind.wait in _ISSUE:
        raise ContractError("the operator already belongs to another kind of call", where=f"{kind.name}: {kind.wait!r}")
    _BLOCKING[kind.blocking] = kind
    _ISSUE.update(dict.fromkeys(issues, kind))
    _WAIT.add(kind.wait)
    for each in kind.operators:
        has_side_effect(each)
    return kind


def kinds() -> tuple[CallKind, ...]:
    """All registered kinds."""
    return tuple(_BLOCKING.values())


def kind_of(node: Node) -> CallKind | None:
    """Return the kind of a call, of its issue, or of its wait; None for any other node."""
    if node.op != "call_function":
        return None
    if is_wait(node):
        issue = node.args[0] if node.args else None
        found = _ISSUE.get(issue.target) if isinstance(issue, Node) and is_issue(issue) else None  # type: ignore[arg-type]
        return found or next(kind for kind in _BLOCKING.values() if kind.wait is node.target)
    return _BLOCKING.get(node.target) or _ISSUE.get(node.target)  # type: ignore[arg-type]


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
has_side_effect(ops.create)
has_side_effect(ops.track_gradient)
