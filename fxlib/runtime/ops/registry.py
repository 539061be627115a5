"""The registry of the operators that fxlib puts into graphs, with one row for each that all their readers share.

A new operator is a row here, its implementation, and a test. The wire takes its allow-list and its checks of arguments
from here, also those of batches; analyses, the propagation of shapes and clients take the sets at the end. By a row's
role they know the operator's effects, and what its result is. The functions of a user's own client form a call kind
(`fxlib.runtime.ops.calls`), and are no operators of fxlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from torch.fx import Node
from torch.fx.node import has_side_effect

from fxlib.runtime import functions
from fxlib.runtime.ops import batches, collectives, operators
from fxlib.runtime.tracking import result_structure


class Role(Enum):
    """The part that an operator plays in a schedule."""

    CALL = "blocks until a result is there"
    ISSUE = "begins a call, and is waited for"
    CREATE = "makes an object on a server, and is not waited for"
    REFERENCE = "makes an RRef to a value of this process"
    WAIT = "returns the result of a call that was issued"
    TRACK = "returns a result that takes a gradient, and notes where this goes"
    CHECK = "raises where a result is not as its contract says"
    LIMIT = "bounds what one forward has in flight"
    LOOKUP = "looks a remote function up by its name"


class Result(Enum):
    """The knowledge of an operator's result that exists before it runs."""

    DECLARED = "what the call's contract or the profile says"
    ARGUMENT = "the first argument"
    NO_TENSOR = "no tensor"
    COMPUTED = "nothing: it is run"


_RESULTS: Final = {
    Role.TRACK: Result.ARGUMENT,
    Role.CREATE: Result.NO_TENSOR,
    Role.REFERENCE: Result.NO_TENSOR,
    Role.CHECK: Result.NO_TENSOR,
    Role.LIMIT: Result.NO_TENSOR,
    Role.LOOKUP: Result.COMPUTED,
}
_KEPT: Final = (Role.CREATE, Role.LIMIT, Role.TRACK)
"""The roles of operators that torch's dead-code elimination must keep. Those of call kinds are kept as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOperator:
    """One row of the registry."""

    function: Callable[..., Any]
    role: Role
    label: str
    """The operator's name on the wire. It is a label: the implementation may move."""
    arguments: int | None = None
    """The number of positional arguments of each call; None if calls differ in it, or take the arguments of torch's."""
    destination_at: int | None = None
    """The position of the argument that is the server, or the RRef that leads to it."""
    function_at: int | None = None
    """The position of the argument that names a remote function; that function's arguments and keywords follow it."""
    calls_at: int | None = None
    """The position of the calls of a batch: a tuple of (function, args, kwargs), which all go to one server."""
    batched_by_at: int | None = None
    """The position of the name of the remote function that serves the batch as a whole, or of None."""
    item_at: int | None = None
    """The position of the number of the call for which a node waits, in the batch that is its first argument."""
    crosses_wire: bool = False
    """Whether the result has surely been copied, so that it shares no memory with the arguments."""

    @property
    def result(self) -> Result:
        """The knowledge of the result that exists before the operator runs."""
        return _RESULTS.get(self.role, Result.DECLARED)


def _row(
    function: Callable[..., Any],
    role: Role,
    arguments: int | None = None,
    *,
    of: str = "fxlib.runtime",
    written: str = "fxlib.runtime.ops",
    **facts: Any,
) -> RuntimeOperator:
    # Generated code of torch.fx names a function by its module. People read and diff that code, so the name
    # stays what it is, wherever the implementation moves.
    function.__module__ = written
    label = f"{of}.{function.__name__}"
    return RuntimeOperator(function=function, role=role, label=label, arguments=arguments, **facts)


OPERATORS: Final = (
    _row(operators.remote_call, Role.CALL, 5, destination_at=0, function_at=1, crosses_wire=True),
    _row(operators.issue_call, Role.ISSUE, 5, destination_at=0, function_at=1, crosses_wire=True),
    _row(operators.start_call, Role.ISSUE, 5, destination_at=0, function_at=1, crosses_wire=True),
    _row(operators.fetch, Role.CALL, 2, destination_at=0),
    _row(operators.issue_fetch, Role.ISSUE, 2, destination_at=0),
    _row(operators.create, Role.CREATE, 5, destination_at=0, function_at=1),
    _row(operators.make_rref, Role.REFERENCE, 1),
    _row(operators.wait, Role.WAIT, 1),
    _row(operators.track_gradient, Role.TRACK, 7, destination_at=1, function_at=2),
    _row(operators.send_gradient, Role.TRACK, 7, destination_at=1, function_at=2),
    _row(
        batches.issue_batch,
        Role.ISSUE,
        4,
        destination_at=0,
        calls_at=1,
        batched_by_at=3,
        crosses_wire=True,
        written="fxlib.runtime.batches",
    ),
    _row(batches.wait_item, Role.WAIT, 2, item_at=1, written="fxlib.runtime.batches"),
    _row(operators.limit_in_flight, Role.LIMIT, 2, written="fxlib.runtime.flow_control"),
    _row(collectives.collective, Role.CALL, crosses_wire=True, written="fxlib.runtime.collectives"),
    _row(collectives.issue_collective, Role.ISSUE, crosses_wire=True, written="fxlib.runtime.collectives"),
    _row(collectives.wait_collective, Role.WAIT, written="fxlib.runtime.collectives"),
    _row(result_structure.check_structure, Role.CHECK, written="fxlib.runtime.structure"),
    _row(result_structure.check_tensor, Role.CHECK, written="fxlib.runtime.structure"),
    _row(result_structure.check_plain, Role.CHECK, written="fxlib.runtime.structure"),
    _row(functions.resolve, Role.LOOKUP, 1, of=functions.__name__, written=functions.__name__, function_at=0),
)

BY_LABEL: Final = {each.label: each for each in OPERATORS}
for _each in OPERATORS:
    if _each.role in _KEPT:
        has_side_effect(_each.function)


def functions_with(*roles: Role) -> frozenset[object]:
    """Return the operators that have one of these roles."""
    return _functions(each for each in OPERATORS if each.role in roles)


def _functions(rows: Any) -> frozenset[object]:
    return frozenset(each.function for each in rows)


CALLS_BY_NAME: Final = _functions(each for each in OPERATORS if each.destination_at == 0 and each.function_at == 1)
"""The operators whose first arguments are a destination and a function's name."""
CREATIONS: Final = functions_with(Role.CREATE)
"""The operators that make an object on a server."""
REFERENCES: Final = functions_with(Role.REFERENCE)
"""The operators that make an RRef to a value of this process."""
LIMITS: Final = functions_with(Role.LIMIT)
"""The operators that bound what one forward has in flight."""
REPEATABLE: Final = CALLS_BY_NAME - CREATIONS
"""The operators among `CALLS_BY_NAME` that make no object on the server."""
REACHING: Final = _functions(
    each for each in OPERATORS if each.destination_at == 0 and each.role in (Role.CALL, Role.ISSUE)
)
"""The calls and issues whose first argument is a destination."""
FETCHES: Final = _functions(each for each in OPERATORS if each.destination_at == 0 and each.label.endswith("fetch"))
CROSSING: Final = _functions(each for each in OPERATORS if each.crosses_wire)
"""The calls whose results, even of this very process, have crossed a wire: they share no memory with arguments."""
TRACKERS: Final = functions_with(Role.TRACK)
"""The operators that let a remote result take a gradient."""
ARGUMENT_RESULTS: Final = _functions(each for each in OPERATORS if each.result is Result.ARGUMENT)
"""The operators that return their first argument, or a tensor like it."""
NO_TENSOR_RESULTS: Final = _functions(each for each in OPERATORS if each.result is Result.NO_TENSOR)
"""The operators whose result is no tensor."""
_CALLS_AT: Final[dict[object, int]] = {each.function: each.calls_at for each in OPERATORS if each.calls_at is not None}
_BATCHED_BY_AT: Final[dict[object, int]] = {
    each.function: each.batched_by_at for each in OPERATORS if each.batched_by_at is not None
}
_ITEM_AT: Final[dict[object, int]] = {each.function: each.item_at for each in OPERATORS if each.item_at is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One call of a batch."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_batch(node: Node) -> bool:
    """Return whether the node issues a batch of calls."""
    return node.target in _CALLS_AT


def is_item(node: Node) -> bool:
    """Return whether the node waits for one call of a batch; it has the call's name, contract and program position."""
    return node.target in _ITEM_AT


def items_of(batch: Node) -> tuple[Item, ...]:
    """Return the calls of a batch, in their order."""
    found: Any = batch.args[_CALLS_AT[batch.target]]
    return tuple(Item(function=str(function), args=args, kwargs=kwargs) for function, args, kwargs in found)


def batched_by_of(batch: Node) -> Any:
    """Return the name of the remote function that serves a batch as a whole, or None."""
    at = _BATCHED_BY_AT.get(batch.target)
    return None if at is None else batch.args[at]


def item_of(wait: Node) -> Item:
    """Return the call of a batch for which a node waits."""
    batch, index = wait.args[0], wait.args[_ITEM_AT[wait.target]]
    assert isinstance(batch, Node) and isinstance(index, int), wait  # noqa: PT018, S101 - callers ask is_item first
    return items_of(batch)[index]


def waits_of(batch: Node) -> tuple[Node, ...] | None:
    """Return the wait of each call of a batch, in the order of the calls; None unless each has exactly one."""
    count = len(items_of(batch))
    waits = {user.args[_ITEM_AT[user.target]]: user for user in batch.users if is_item(user)}
    if len(batch.users) != count or waits.keys() != set(range(count)):
        return None
    return tuple(waits[index] for index in range(count))
