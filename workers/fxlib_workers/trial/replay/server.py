"""A server process that replays: what trainers call on it, and what `trial.servers` calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed import autograd as dist_autograd
from torch.utils.weak import WeakTensorKeyDictionary

from fxlib import batch
from fxlib.errors import WorkloadError
from fxlib.profiling.single_call import message_bytes
from fxlib.spec.contract import Contract
from fxlib.spec.profile import ServerProfile, TensorShape
from fxlib_workers.trial.digests import digest, tensors
from fxlib_workers.trial.replay.by_key import KeyedWrites, keys_of, make_rows, rows_of, without_keys
from fxlib_workers.trial.replay.history import WriteHistory
from fxlib_workers.trial.replay.latency_model import NOT_BATCHED, BatchPosition, LatencyModel, NetworkCost, sleep_until
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.replies import attach_to, call_digest, combined, make_reply

UNMEASURED: Final = ServerProfile(name="", round_trip_s=0.0, concurrency=16, bytes_per_s=1e12)
"""The figures of a server that the profile does not know: it works on as many calls as an RPC agent has threads."""

_STEP: Final = b"step"


class ReplayServer:
    """One server of a replay: it answers calls, and remembers what was written.

    Args:
        plan: what is replayed.
        name: the server's name.

    Attributes:
        plan: what is replayed.
        latency: how long answers take.
    """

    def __init__(self, plan: ReplayPlan, name: str) -> None:
        self.plan = plan
        self.latency = LatencyModel(plan.servers.get(name, UNMEASURED), plan.seed)
        self._lock = threading.Lock()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._history = WriteHistory()
        self._keyed = KeyedWrites()

    def reset(self) -> None:
        """Forget all writes, and draw the same times again."""
        self._history = WriteHistory()
        self._keyed = KeyedWrites()
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

        A call reads the state at its arrival, and its writes show when it ends. So two calls that overlap although
        they must not leave other bits behind than the same calls one after the other.
        """
        arrived, history, keyed = time.perf_counter(), self._history, self._keyed
        contract, recorded = self.plan.contract_of(function, call), self._recorded(function, call, (args, kwargs))
        request = call_digest(function, args, kwargs)
        part = _part(contract, args, kwargs)
        rows = None if batch.in_autograd_context() else rows_of(contract, recorded.returns, args, kwargs)
        if contract is not None and rows is not None:
            # Row by row: what a write to other keys leaves alone comes back with the same bits.
            same = call_digest(function, *without_keys(contract, args, kwargs))
            seeds = keyed.visible_to(contract, part, rows, combined(same, keyed.others.visible_to(contract, part)))
            reply = make_rows(recorded.returns, seeds)
        else:
            reply = self._reply(recorded, combined(request, history.visible_to(contract, part)), (args, kwargs))
        self.latency.serve(f"{function}#{call}", recorded, arrived=arrived, position=position)
        history.write(contract, request, part)
        keyed.write(contract, request, part, keys_of(contract, args, kwargs))
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
            for index, each in enumerate(tensors(reply)):
                if each.requires_grad:
                    self._names[each] = combined(seed, str(index).encode())
        return attach_to(reply, [each for each in tensors(sent) if each.requires_grad])


class ReplayedFunction:
    """Stands in for a remote function on a trainer, and travels by its name; called on a server, it replays.

    Args:
        function: the name of the remote function.
        call: the name of the call in the program; empty where only the function is known.
        contract: the function's contract, which passes and profiles read from functions.
    """

    __slots__ = ("__fxlib_contract__", "call", "function")

    def __init__(self, function: str, call: str = "", contract: Contract | None = None) -> None:
        self.function = function
        self.call = call
        self.__fxlib_contract__ = contract

    def __reduce__(self) -> tuple[type[ReplayedFunction], tuple[str, str]]:
        """Pickle by name, without the contract, which the server has."""
        return ReplayedFunction, (self.function, self.call)

    def __eq__(self, other: object) -> bool:
        """Whether the other one stands in for the same call."""
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
        position = BatchPosition(index=batch.place(), concurrent=batch.side_by_side())
        return server.answer(self.function, self.call, args, kwargs, position)


class ReplayedBatch:
    """Stands in for the declared batched form of a function.

    A profile does not know the time of such a form. So it answers its calls one after another, each in its own time,
    and never looks faster than it is.
    """

    __slots__ = ("_items",)

    def __init__(self, items: tuple[ReplayedFunction, ...]) -> None:
        self._items = items

    def __reduce__(self) -> tuple[type[ReplayedBatch], tuple[tuple[ReplayedFunction, ...]]]:
        """Pickle by the names of its calls."""
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
        """Return the method called `name`, with the name of a call behind a "#" where it is known."""
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
    """Return the server that this process replays; None if it replays none."""
    return _server


def active() -> ReplayServer:
    """Return the server that this process replays.

    Raises:
        WorkloadError: it does not replay.
    """
    if _server is None:
        raise WorkloadError("this process replays nothing", where="trial")
    return _server


def set_network_cost(cost: NetworkCost) -> None:
    """Set what the trial's own network takes for a call to this process."""
    active().latency.network = cost


def echo(sent: torch.Tensor, size_bytes: int, sleep_s: float) -> Any:
    """Return `size_bytes` bytes after `sleep_s`, with the work that an answer takes: calibration calls this."""
    arrived = time.perf_counter()
    reply = make_reply(TensorShape(shape=(size_bytes,), dtype=torch.uint8), call_digest(sent), attached=False)
    sleep_until(arrived + sleep_s)
    return reply


def _part(contract: Contract | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the part of the state that a call reads or writes; empty where it may be all of it."""
    given = None if contract is None else contract.part_of(args, kwargs)
    return "" if given is None else repr(given)
