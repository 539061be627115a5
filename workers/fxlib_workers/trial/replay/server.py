"""A server process that replays, with the functions that trainers and `trial.server_state` call on it.

Instead of its state, it keeps digests of the writes to it, by the resources of contracts. If a contract names keys,
replies are made row by row: the bits of a row change if its key was written, and only then.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch.distributed import autograd as dist_autograd
from torch.utils.weak import WeakTensorKeyDictionary

from fxlib import batch
from fxlib.errors import WorkloadError
from fxlib.profiling.single_call import message_bytes
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Result, ServerProfile, TensorShape
from fxlib.utils.pytree import tensors_in
from fxlib_workers.trial.digests import digest
from fxlib_workers.trial.replay.latency_model import NOT_BATCHED, BatchPosition, LatencyModel, NetworkCost, sleep_until
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.replies import attach_to, call_digest, combined, made_rows, make_reply

_ANY: Final = "*"
_MODULUS: Final = 1 << 128
_NOTHING: Final = b""
_MIX: Final = -7046029254386353131
"""An odd number whose multiples, in 64 bits, look like drawn ones: 2^64 divided by the golden ratio (Knuth)."""
_SHIFT: Final = 29

_INTEGERS: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
UNMEASURED: Final = ServerProfile(name="", round_trip_s=0.0, concurrency=16, bytes_per_s=1e12)
"""The figures of a server that the profile lacks, which works on as many calls as an RPC agent has threads."""

_STEP: Final = b"step"


class WriteHistory:
    """The writes so far. It may be used by several threads.

    A call without a contract may write everything on the server. The digests of writes that commute are added up, so
    that their order has no effect; all others are chained, separately for each part of a resource.
    """

    def __init__(self) -> None:
        """Begin without a write."""
        self._lock = threading.Lock()
        self._all = _NOTHING
        self._chained: dict[str, dict[str, bytes]] = {}
        self._summed: dict[str, int] = {}
        self._known: dict[tuple[str, bool], bytes] = {}
        """The digests of resources, cached until the next write."""

    def visible_to(self, contract: Contract | None, part: str = "") -> bytes:
        """Return the digest of all that a call may read. Writes to other state or other parts do not change it."""
        if contract is not None and contract.pure:
            return _NOTHING
        with self._lock:
            if contract is None or _ANY in contract.reads | contract.writes:
                return self._whole()
            # A write that commutes must not depend on which others of its kind came before it.
            blind = contract.writes if contract.commutes else frozenset[str]()
            names = sorted(contract.reads | (frozenset() if part else contract.writes))
            return combined(self._all, *(self._resource(name, blind=name in blind) for name in names))

    def write(self, contract: Contract | None, call: bytes, part: str = "") -> None:
        """Add the digest of a finished call, if it writes, to one part of its resources or to all of them."""
        if contract is not None and not contract.writes:
            return
        with self._lock:
            self._add(contract, call, part)
            self._known.clear()

    def digest(self) -> str:
        """Return one digest of everything."""
        with self._lock:
            return self._whole().hex()

    def _add(self, contract: Contract | None, call: bytes, part: str) -> None:
        if contract is None or _ANY in contract.writes:
            self._all = combined(self._whole(), call)
            self._chained.clear()
            self._summed.clear()
            return
        for name in contract.writes:
            if contract.commutes:
                self._summed[name] = (self._summed.get(name, 0) + int.from_bytes(call, "big")) % _MODULUS
            elif part:
                parts = self._chained.setdefault(name, {})
                parts[part] = combined(parts.get(part, _NOTHING), b"\0", call)
            else:
                self._chained[name] = {_ANY: combined(self._resource(name, blind=False), call)}
                self._summed.pop(name, None)

    def _whole(self) -> bytes:
        names = sorted(self._chained.keys() | self._summed.keys())
        return combined(self._all, *(self._resource(name, blind=False) for name in names))

    def _resource(self, name: str, *, blind: bool) -> bytes:
        if (known := self._known.get((name, blind))) is not None:
            return known
        summed = 0 if blind else self._summed.get(name, 0)
        parts = (
            combined(part.encode(), b"\0", written) for part, written in sorted(self._chained.get(name, {}).items())
        )
        found = self._known[name, blind] = combined(name.encode(), b"\0", *parts, summed.to_bytes(16, "big"))
        return found


class _KeyedWrites:
    """The digests of writes under each key. It may be used by several threads.

    Attributes:
        others: the writes that do not name their keys.
    """

    def __init__(self) -> None:
        """Begin without a write."""
        self.others = WriteHistory()
        self._lock = threading.Lock()
        self._written: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        """The number that the last write of each key has left, by resource and part."""

    def visible_to(self, contract: Contract, part: str, rows: torch.Tensor, seed: bytes) -> torch.Tensor:
        """Return a number for each row of a read, from its keys, the writes under them, and the seed of the call.

        Args:
            contract: the contract of the read.
            part: the part of the state that it reads; empty for all of it.
            rows: its keys, with one more dimension than its rows have if a row has several.
            seed: the seed of all of its rows.
        """
        keys = rows.reshape(-1).tolist()
        with self._lock:
            known = [
                [each.get(key, 0) for key in keys]
                for (name, other), each in sorted(self._written.items())
                if (name in contract.reads or _ANY in (name, *contract.reads)) and (part in ("", other) or not other)
            ]
        numbers = _mixed(rows.reshape(-1).to(torch.int64) + _number(seed))
        for each in known:  # a key that was never written has 0 here, which leaves its row unchanged
            numbers = numbers + _mixed(torch.tensor(each, dtype=torch.int64))
        numbers = _mixed(numbers)
        return _mixed(numbers.view(rows.shape).flatten(1).sum(1)) if rows.dim() > 1 else numbers

    def write(self, contract: Contract | None, call: bytes, part: str, keys: torch.Tensor | None) -> None:
        """Add the digest of a finished call, if it writes, under its keys or under all."""
        if contract is not None and not contract.writes:
            return
        if contract is None or keys is None:
            self.others.write(contract, call, part)
            return
        number = _number(call)
        with self._lock:
            for name in contract.writes:
                written = self._written[name, part]
                for key in set(keys.reshape(-1).tolist()):
                    before = written.get(key, 0)
                    # The order of writes that commute must have no effect.
                    written[key] = _signed(before + number) if contract.commutes else hash((before, number))


def _keys_of(contract: Contract | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the keys of a call; None if it has none that distinguish rows."""
    if contract is None or contract.keys is None:
        return None
    found = contract.keys_of(tuple(args), kwargs)
    return found if isinstance(found, torch.Tensor) and found.dtype in _INTEGERS and found.dim() else None


def _rows_of(
    contract: Contract | None, returns: Result, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the keys of the rows with which a read is answered; None if it is answered as a whole."""
    keys = _keys_of(contract, args, kwargs)
    if keys is None or contract is None or contract.writes or not _has_rows(returns):
        return None
    return keys


def _without_keys(contract: Contract, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the arguments of a call other than its keys."""
    rest = [each for place, each in enumerate(args) if place != contract.keys_at]
    return rest, {name: each for name, each in kwargs.items() if name != contract.keys}


def _make_rows(returns: Result, numbers: torch.Tensor) -> torch.Tensor:
    """Make a synthetic row for each number; equal numbers give equal bits."""
    assert _has_rows(returns)  # noqa: S101 - `_rows_of` has checked
    return made_rows(numbers, returns.shape[1:], returns.dtype)


def _has_rows(returns: Result) -> TypeGuard[TensorShape]:
    return isinstance(returns, TensorShape) and bool(returns.shape) and not returns.dtype.is_complex


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    multiplied = numbers * _MIX
    return multiplied ^ (multiplied >> _SHIFT)


def _signed(number: int) -> int:
    """Return a number as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


class ReplayServer:
    """One server of a replay: it answers calls, and remembers what was written.

    Args:
        plan: what is replayed.
        name: the server's name.

    Attributes:
        plan: what is replayed.
        latency: the model of the times of answers.
    """

    def __init__(self, plan: ReplayPlan, name: str) -> None:
        self.plan = plan
        self.latency = LatencyModel(plan.servers.get(name, UNMEASURED), plan.seed)
        self._lock = threading.Lock()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._history = WriteHistory()
        self._keyed = _KeyedWrites()

    def reset(self) -> None:
        """Forget all writes, and restart the sequence of drawn times."""
        self._history = WriteHistory()
        self._keyed = _KeyedWrites()
        self.latency.reset()

    def digest(self) -> str:
        """Return the digest of all writes."""
        return self._history.digest()

    def answer(
        self,
        function: str,
        call: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        position: BatchPosition = NOT_BATCHED,
    ) -> Any:
        """Answer a call after its recorded time.

        A call reads the state at its arrival, and its writes become visible when it ends. So two calls that overlap
        although they must not leave different bits behind than the same calls one after another.
        """
        arrived, history, keyed = time.perf_counter(), self._history, self._keyed
        contract, recorded = self.plan.contract_of(function, call), self._recorded(function, call, (args, kwargs))
        request = call_digest(function, args, kwargs)
        part = _part(contract, args, kwargs)
        rows = None if batch.in_autograd_context() else _rows_of(contract, recorded.returns, args, kwargs)
        if contract is not None and rows is not None:
            # Row by row, so that rows that a write to other keys does not affect have the same bits.
            same = call_digest(function, *_without_keys(contract, args, kwargs))
            seeds = keyed.visible_to(contract, part, rows, combined(same, keyed.others.visible_to(contract, part)))
            reply = _make_rows(recorded.returns, seeds)
        else:
            reply = self._reply(recorded, combined(request, history.visible_to(contract, part)), (args, kwargs))
        self.latency.serve(f"{function}#{call}", recorded, arrived=arrived, position=position)
        history.write(contract, request, part)
        keyed.write(contract, request, part, _keys_of(contract, args, kwargs))
        return reply

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Return the gradients that a distributed autograd context holds for replies of this server."""
        found: dict[str, torch.Tensor] = {}
        gradients = dist_autograd.get_gradients(context)
        with self._lock:
            named = [(self._names[leaf].hex(), gradients[leaf]) for leaf in gradients if leaf in self._names]
        for name, gradient in sorted(named, key=lambda each: (each[0], digest(each[1]))):
            found[f"reply {name} {len(found)}"] = gradient
        return found

    def step(self, context: int) -> None:
        """Count the gradients of a distributed autograd context as a write of everything."""
        if found := self.gradients(context):
            self._history.write(None, call_digest(_STEP, found))

    def _recorded(self, function: str, call: str, sent: object) -> RecordedCall:
        calls = self.plan.calls.get(function)
        if calls is None:
            raise WorkloadError(f"the profile has no call of {function!r}", where="trial")
        if call in calls:
            return calls[call]
        size = message_bytes(sent)
        return min(calls.values(), key=lambda each: abs(each.request_bytes - size))

    def _reply(self, recorded: RecordedCall, seed: bytes, sent: object) -> Any:
        attached = recorded.takes_gradient and batch.in_autograd_context()
        reply = make_reply(recorded.returns, seed, attached=attached)
        if not attached:
            return reply
        with self._lock:
            for index, each in enumerate(tensors_in(reply)):
                if each.requires_grad:
                    self._names[each] = combined(seed, str(index).encode())
        return attach_to(reply, [each for each in tensors_in(sent) if each.requires_grad])


class ReplayedFunction:
    """Stands in for a remote function on a trainer and travels by its name. Called on a server, it replays.

    Args:
        function: the name of the remote function.
        call: the name of the call in the program; empty if only the function is known.
        contract: the function's contract, which passes and profiles read from functions.
    """

    __slots__ = ("__fxlib_contract__", "call", "function")

    def __init__(self, function: str, call: str = "", contract: Contract | None = None) -> None:
        self.function = function
        self.call = call
        self.__fxlib_contract__ = contract

    def __reduce__(self) -> tuple[type[ReplayedFunction], tuple[str, str]]:
        """Support pickling by name, without the contract, which the server has."""
        return ReplayedFunction, (self.function, self.call)

    def __eq__(self, other: object) -> bool:
        """Return whether the other one stands in for the same call."""
        return isinstance(other, ReplayedFunction) and (self.function, self.call) == (other.function, other.call)

    def __hash__(self) -> int:
        """Return a hash of function and call."""
        return hash((self.function, self.call))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as recorded.

        Raises:
            WorkloadError: this process does not replay.
        """
        server = active()
        if self.function in server.plan.factories:
            return ReplayedObject(call_digest(self.function, args, kwargs).hex())
        position = BatchPosition(index=batch.position_in_message(), concurrent=batch.side_by_side())
        return server.answer(self.function, self.call, args, kwargs, position)


class ReplayedBatch:
    """Stands in for the declared batched form of a function.

    A profile does not have the time of such a form. So it answers its calls one after another, each in its own time,
    and never looks faster than it is.
    """

    __slots__ = ("_items",)

    def __init__(self, items: tuple[ReplayedFunction, ...]) -> None:
        self._items = items

    def __reduce__(self) -> tuple[type[ReplayedBatch], tuple[tuple[ReplayedFunction, ...]]]:
        """Support pickling by the names of its calls."""
        return ReplayedBatch, (self._items,)

    def __call__(self, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """Answer each call as recorded.

        Raises:
            WorkloadError: this process does not replay.
        """
        server = active()
        return [
            server.answer(item.function, item.call, args, kwargs, BatchPosition(index=index))
            for index, (item, (args, kwargs)) in enumerate(zip(self._items, calls, strict=True))
        ]


class _AnyMethod(type):
    """A class that has every method, since `torch.distributed.rpc` looks methods up on an RRef's class."""

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)


class ReplayedObject(metaclass=_AnyMethod):
    """The object behind an RRef whose class no process has: its methods answer as recorded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the method called `name`, which ends with "#" and the name of a call if that is known."""
        if name.startswith("_"):
            raise AttributeError(name)
        method, _, call = name.partition("#")

        def answered(*args: Any, **kwargs: Any) -> Any:
            sent = (self._name, *args)
            return active().answer(f".{method}", call, sent, kwargs)

        return answered


_server: ReplayServer | None = None


def start(plan: ReplayPlan, name: str) -> ReplayServer:
    """Make this process a server that replays."""
    global _server  # noqa: PLW0603 - remote functions find a process's state by its module
    _server = ReplayServer(plan, name)
    return _server


def current() -> ReplayServer | None:
    """Return the server that this process replays, or None if it replays none."""
    return _server


def active() -> ReplayServer:
    """Return the server that this process replays.

    Raises:
        WorkloadError: this process does not replay.
    """
    if _server is None:
        raise WorkloadError("this process replays nothing", where="trial")
    return _server


def set_network_cost(cost: NetworkCost) -> None:
    """Set the cost of a call to this process in the trial's own network."""
    active().latency.network = cost


def echo(sent: torch.Tensor, size_bytes: int, sleep_s: float) -> Any:
    """Return `size_bytes` bytes after `sleep_s`, with the work of an answer; calibration calls this."""
    arrived = time.perf_counter()
    reply = make_reply(TensorShape(shape=(size_bytes,), dtype=torch.uint8), call_digest(sent), attached=False)
    sleep_until(arrived + sleep_s)
    return reply


def _part(contract: Contract | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the part of the state that a call reads or writes; empty if it may be all of it."""
    given = None if contract is None else contract.part_of(args, kwargs)
    return "" if given is None else repr(given)
