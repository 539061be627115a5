"""What a trial's servers are to replay: which functions, how they answer, and what their contracts say."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fxlib.errors import LimitError
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Opaque, Profile, Result, ServerProfile, Spread, TensorShape
from fxlib.spec.servers import is_worker_name

MAX_REPLY_BYTES: Final = 1 << 30
"""Of all tensors of one reply."""

MAX_REPLY_LEAVES: Final = 10_000
MAX_SERVICE_S: Final = 60.0
_NOTHING: Final = Opaque()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How one call of the program was answered when it was measured."""

    to: str
    returns: Result
    service_s: Spread
    request_bytes: int
    response_bytes: int
    takes_gradient: bool = field(init=False)
    """Whether a tensor of its result took a gradient: one of distributed autograd, on the server."""

    def __post_init__(self) -> None:
        """Look at the result once, and not at each answer."""
        shapes = (leaf for leaf in leaves_of(self.returns) if isinstance(leaf, TensorShape))
        object.__setattr__(self, "takes_gradient", any(each.requires_grad for each in shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All that replay goes by.

    Attributes:
        lines: by remote function, then by the name of the call as captured.
        functions: what no process of the trial has, and is replayed wherever it is called.
        strangers: servers that the workload does not describe: whatever is recorded of them is replayed.
        objects: RRefs of the workload whose class no process of the trial has.
        makers: functions nobody has that make an object whose methods are called.
        contracts: of functions, where one is known: by "function#call", or by "function".
        servers: how fast they are, by name.
        seed: of the times that are drawn.
    """

    lines: Mapping[str, Mapping[str, Line]]
    functions: frozenset[str] = frozenset()
    strangers: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    makers: frozenset[str] = frozenset()
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    servers: Mapping[str, ServerProfile] = field(default_factory=dict)
    seed: int = 0

    def plays(self, to: str | None, function: str, call: str) -> bool:
        """Whether a call is replayed; `to` is None where only the run can tell."""
        if function not in self.lines:
            return function in self.makers
        recorded = self.lines[function].get(call)
        return function in self.functions or (to or (recorded.to if recorded else "")) in self.strangers

    def contract_of(self, function: str, call: str) -> Contract | None:
        """Return the contract of one call of a function; None if it is unknown."""
        return self.contracts.get(f"{function}#{call}") or self.contracts.get(function)

    def serves(self, function: str) -> bool:
        """Whether a function that nobody has is replayed, or is the declared batched form of such a one."""
        batched = {
            contract.batched_by for name, contract in self.contracts.items() if name.partition("#")[0] in self.lines
        }
        return function in self.lines or function in self.makers or function in batched


def lines_of(profile: Profile, created: Mapping[str, Iterable[str]] | None = None) -> dict[str, dict[str, Line]]:
    """Return what a profile records, by remote function and call; a push goes by the name of the call it is for.

    Args:
        profile: the record.
        created: calls that fetch what a function makes: so does the function go by them.

    Raises:
        LimitError: a reply is too large, or a call takes too long, for a trial to repeat; names the call.
    """
    lines: dict[str, dict[str, Line]] = {}
    for call in profile.calls:
        for function, line in _lines(call):
            _check(line, f"Profile.calls[{call.call[:80]!r}]")
            lines.setdefault(function, {})[call.call] = line
    for function, fetches in (created or {}).items():
        for name in fetches:
            if (fetched := profile.call_by_name.get(name)) is not None:
                lines.setdefault(function, {})[name] = _answer(fetched)
    return lines


def strangers_of(profile: Profile, known: Collection[str]) -> tuple[str, ...]:
    """Return the servers of a profile's calls that are not known, sorted.

    A name that no worker can have is that of what a client of the job's own reaches.
    """
    return tuple(sorted({call.to for call in profile.calls if is_worker_name(call.to)} - set(known)))


def reply_bytes(result: Result) -> int:
    """Return the bytes of all tensors of a result."""
    tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, TensorShape)]
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)


def leaves_of(result: Result) -> Iterator[object]:
    """Yield the leaves of a result, in order."""
    pending: list[Result] = [result]
    while pending:
        found = pending.pop()
        if isinstance(found, (tuple, list)):
            pending += reversed(found)
        elif isinstance(found, dict):
            pending += reversed(found.values())
        else:
            yield found


def _answer(call: CallProfile) -> Line:
    return Line(
        to=call.to,
        returns=call.returns,
        service_s=call.service_s,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
    )


def _lines(call: CallProfile) -> Iterable[tuple[str, Line]]:
    yield call.function, _answer(call)
    if (push := call.push) is not None:
        yield (
            push.function,
            Line(
                to=call.to,
                returns=_NOTHING,
                service_s=push.service_s,
                request_bytes=push.request_bytes,
                response_bytes=0,
            ),
        )


def _check(line: Line, where: str) -> None:
    leaves = list(leaves_of(line.returns))
    if len(leaves) > MAX_REPLY_LEAVES:
        raise LimitError(f"{len(leaves)} parts of one result exceed the limit of {MAX_REPLY_LEAVES}", where=where)
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, TensorShape)]
    if any(size < 0 for shape in shapes for size in shape):
        raise LimitError("a tensor of negative size", where=where)
    if (size := reply_bytes(line.returns)) > MAX_REPLY_BYTES:
        raise LimitError(f"a result of {size} bytes exceeds the limit of {MAX_REPLY_BYTES}", where=where)
    longest_s = max(line.service_s.quantiles)
    if not 0 <= longest_s <= MAX_SERVICE_S:
        raise LimitError(f"a service time of {longest_s:g} s exceeds the limit of {MAX_SERVICE_S:g}", where=where)
