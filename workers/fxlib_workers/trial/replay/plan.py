"""The plan of what a trial's servers replay: which functions, with which answers, and under which contracts."""

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
"""Size in bytes of the largest reply, summed over its tensors."""

MAX_REPLY_LEAVES: Final = 10_000
MAX_SERVICE_S: Final = 60.0
_NOTHING: Final = Opaque()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A call of the program, with its answer when it was measured.

    Attributes:
        to: the name of its server.
        returns: the structure of its result.
        service_s: the seconds from the end of the issue to the arrival of the answer.
        request_bytes: the size of the request.
        response_bytes: the size of the answer.
        takes_gradient: whether a tensor of the result took a gradient of distributed autograd on the server.
    """

    to: str
    returns: Result
    service_s: Spread
    request_bytes: int
    response_bytes: int
    takes_gradient: bool = field(init=False)

    def __post_init__(self) -> None:
        """Examine the result once, instead of at each answer."""
        shapes = (leaf for leaf in leaves_of(self.returns) if isinstance(leaf, TensorShape))
        object.__setattr__(self, "takes_gradient", any(each.requires_grad for each in shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Everything that replay depends on.

    Attributes:
        calls: the recorded calls, by remote function and then by the call's name as captured.
        functions: functions that no process of the trial has; they are replayed wherever they are called.
        undescribed: servers that the workload does not describe; all their recorded calls are replayed.
        objects: RRefs of the workload whose class no process of the trial has.
        factories: functions that no process has, and that make an object whose methods are called.
        contracts: the known contracts of functions, by "function#call" or by "function".
        servers: the speed of the servers, by name.
        seed: the seed of the times that are drawn.
    """

    calls: Mapping[str, Mapping[str, RecordedCall]]
    functions: frozenset[str] = frozenset()
    undescribed: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    factories: frozenset[str] = frozenset()
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    servers: Mapping[str, ServerProfile] = field(default_factory=dict)
    seed: int = 0

    def replays(self, to: str | None, function: str, call: str) -> bool:
        """Return whether a call is replayed; `to` is None if only the run determines it."""
        if function not in self.calls:
            return function in self.factories
        recorded = self.calls[function].get(call)
        return function in self.functions or (to or (recorded.to if recorded else "")) in self.undescribed

    def contract_of(self, function: str, call: str) -> Contract | None:
        """Return the contract of one call of a function; None if it is unknown."""
        return self.contracts.get(f"{function}#{call}") or self.contracts.get(function)

    def serves(self, function: str) -> bool:
        """Return whether a function that no process has is replayed, or is the declared batched form of one that is."""
        batched = {
            contract.batched_by for name, contract in self.contracts.items() if name.partition("#")[0] in self.calls
        }
        return function in self.calls or function in self.factories or function in batched


def recorded_calls(
    profile: Profile, created: Mapping[str, Iterable[str]] | None = None
) -> dict[str, dict[str, RecordedCall]]:
    """Return a profile's calls, by remote function and call; a push has the name of the call whose gradient it sends.

    Args:
        profile: the profile.
        created: by function that makes an object, the names of the calls that fetch the object.

    Raises:
        LimitError: a reply is too large, or a call takes too long, for a trial to repeat; the error names the call.
    """
    found: dict[str, dict[str, RecordedCall]] = {}
    for call in profile.calls:
        for function, recorded in _calls_of(call):
            _check(recorded, f"Profile.calls[{call.call[:80]!r}]")
            found.setdefault(function, {})[call.call] = recorded
    for function, fetches in (created or {}).items():
        for name in fetches:
            if (fetched := profile.call_by_name.get(name)) is not None:
                found.setdefault(function, {})[name] = _answer(fetched)
    return found


def undescribed_servers(profile: Profile, known: Collection[str]) -> tuple[str, ...]:
    """Return the servers of a profile's calls that are not known, sorted.

    A name that no worker can have is not a server's, but the target of one of the job's own clients.
    """
    return tuple(sorted({call.to for call in profile.calls if is_worker_name(call.to)} - set(known)))


def reply_bytes(result: Result) -> int:
    """Return the total size in bytes of the tensors of a result."""
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


def _answer(call: CallProfile) -> RecordedCall:
    return RecordedCall(
        to=call.to,
        returns=call.returns,
        service_s=call.service_s,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
    )


def _calls_of(call: CallProfile) -> Iterable[tuple[str, RecordedCall]]:
    yield call.function, _answer(call)
    if (push := call.push) is not None:
        yield (
            push.function,
            RecordedCall(
                to=call.to,
                returns=_NOTHING,
                service_s=push.service_s,
                request_bytes=push.request_bytes,
                response_bytes=0,
            ),
        )


def _check(call: RecordedCall, where: str) -> None:
    leaves = list(leaves_of(call.returns))
    if len(leaves) > MAX_REPLY_LEAVES:
        raise LimitError(f"{len(leaves)} parts of one result exceed the limit of {MAX_REPLY_LEAVES}", where=where)
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, TensorShape)]
    if any(size < 0 for shape in shapes for size in shape):
        raise LimitError("a tensor has a negative size", where=where)
    if (size := reply_bytes(call.returns)) > MAX_REPLY_BYTES:
        raise LimitError(f"a result of {size} bytes exceeds the limit of {MAX_REPLY_BYTES}", where=where)
    longest_s = max(call.service_s.quantiles)
    if not 0 <= longest_s <= MAX_SERVICE_S:
        raise LimitError(f"a service time of {longest_s:g} s exceeds the limit of {MAX_SERVICE_S:g}", where=where)
