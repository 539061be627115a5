"""A server process that replays: what trainers call, and what the server module asks of it."""

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
from fxlib.profiling.message_sizes import message_bytes
from fxlib.spec.contract import Contract
from fxlib.spec.profile import ServerProfile, TensorShape
from fxlib_workers.trial.digests import digest, tensors
from fxlib_workers.trial.replay.history import History
from fxlib_workers.trial.replay.latency_model import ALONE, Pace, Turn, Wire, sleep_until
from fxlib_workers.trial.replay.plan import Line, Script
from fxlib_workers.trial.replay.replies import computed_from, joined, reply_of, told

UNMEASURED: Final = ServerProfile(name="", round_trip_s=0.0, concurrency=16, bytes_per_s=1e12)
"""A server of which the profile has no figures: as many calls at once as an RPC agent has threads."""

_STEP: Final = b"step"


class Stage:
    """One server's part of a script: it answers calls, and remembers what was written."""

    def __init__(self, script: Script, name: str) -> None:
        self._script = script
        self.objects = script.objects
        """RRefs whose objects are stood in for."""
        self.makers = script.makers
        """Functions that make such objects."""
        self.pace = Pace(script.servers.get(name, UNMEASURED), script.seed)
        self._lock = threading.Lock()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._history = History()

    def reset(self) -> None:
        """Forget all writes, and begin the drawn times anew."""
        self._history = History()
        self.pace.reset()

    def digest(self) -> str:
        """Return the digest of all that was written."""
        return self._history.digest()

    def answer(
        self, function: str, call: str, args: Sequence[Any], kwargs: Mapping[str, Any], turn: Turn = ALONE
    ) -> Any:
        """Answer a call after its time.

        What it reads counts as it is when the call arrives, and what it writes is there when it is over: two calls
        that overlap although they must not leave other bits than one after the other.
        """
        arrived, history = time.perf_counter(), self._history
        contract, line = self._script.contract_of(function, call), self._line(function, call, (args, kwargs))
        request = told(function, args, kwargs)
        part = _part(contract, args, kwargs)
        reply = self._reply(line, joined(request, history.seen(contract, part)), (args, kwargs))
        self.pace.serve(f"{function}#{call}", line, arrived=arrived, turn=turn)
        history.write(contract, request, part)
        return reply

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Return what a distributed autograd context holds for replies of this server, by their digest."""
        found: dict[str, torch.Tensor] = {}
        held = dist_autograd.get_gradients(context)
        with self._lock:
            named = [(self._names[leaf].hex(), held[leaf]) for leaf in held if leaf in self._names]
        for name, gradient in sorted(named, key=lambda each: (each[0], digest(each[1]))):
            found[f"reply {name} {len(found)}"] = gradient
        return found

    def step(self, context: int) -> None:
        """Take the gradients of a distributed autograd context for a write of everything."""
        if found := self.gradients(context):
            self._history.write(None, told(_STEP, found))

    def _line(self, function: str, call: str, sent: object) -> Line:
        lines = self._script.lines.get(function)
        if lines is None:
            raise WorkloadError(f"the profile has no call of {function!r}", where="trial")
        if call in lines:
            return lines[call]
        size = message_bytes(sent)
        return min(lines.values(), key=lambda line: abs(line.request_bytes - size))

    def _reply(self, line: Line, seed: bytes, sent: object) -> Any:
        attached = line.takes_gradient and batch.in_autograd_context()
        reply = reply_of(line.returns, seed, attached=attached)
        if not attached:
            return reply
        with self._lock:
            for place, each in enumerate(tensors(reply)):
                if each.requires_grad:
                    self._names[each] = joined(seed, str(place).encode())
        return computed_from(reply, [each for each in tensors(sent) if each.requires_grad])


class Replayed:
    """Stands in for a remote function on a trainer, and travels by its name. Called on a server, it is answered there.

    Args:
        function: the name of what it stands for.
        call: which call of the program; empty where only the function is known.
        contract: of the function, for those who ask a function for its contract.
    """

    __slots__ = ("__fxlib_contract__", "call", "function")

    def __init__(self, function: str, call: str = "", contract: Contract | None = None) -> None:
        self.function = function
        self.call = call
        self.__fxlib_contract__ = contract

    def __reduce__(self) -> tuple[type[Replayed], tuple[str, str]]:
        """Travel without the contract: the server has it."""
        return Replayed, (self.function, self.call)

    def __eq__(self, other: object) -> bool:
        """Equal to what stands for the same call."""
        return isinstance(other, Replayed) and (self.function, self.call) == (other.function, other.call)

    def __hash__(self) -> int:
        """By what makes it equal."""
        return hash((self.function, self.call))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as recorded.

        Raises:
            WorkloadError: this process does not replay.
        """
        playing = present()
        if self.function in playing.makers:
            return ReplayedObject(told(self.function, args, kwargs).hex())
        turn = Turn(place=batch.place(), side_by_side=batch.side_by_side())
        return playing.answer(self.function, self.call, args, kwargs, turn)


class ReplayedTogether:
    """Stands in for the declared batched form of a function, of whose time a profile says nothing.

    So it serves its calls one after another, each in its own time: the form is not taken to be faster than it is.
    """

    __slots__ = ("_items",)

    def __init__(self, items: tuple[Replayed, ...]) -> None:
        self._items = items

    def __reduce__(self) -> tuple[type[ReplayedTogether], tuple[tuple[Replayed, ...]]]:
        """Travel by the names of its calls."""
        return ReplayedTogether, (self._items,)

    def __call__(self, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """Answer each call as recorded.

        Raises:
            WorkloadError: this process does not replay.
        """
        stage = present()
        return [
            stage.answer(item.function, item.call, args, kwargs, Turn(place=place))
            for place, (item, (args, kwargs)) in enumerate(zip(self._items, calls, strict=True))
        ]


class _AnyMethod(type):
    """Methods that are named only by the profile: `torch.distributed.rpc` looks a method up on an RRef's class."""

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)


class ReplayedObject(metaclass=_AnyMethod):
    """Stands behind an RRef to an object of a class that nobody here has: its methods answer as recorded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the method called `name`, with the name of a call behind a "#" where it is known."""
        if name.startswith("_"):
            raise AttributeError(name)
        method, _, call = name.partition("#")

        def answered(*args: Any, **kwargs: Any) -> Any:
            sent = (self._name, *args)
            return present().answer(f".{method}", call, sent, kwargs)

        return answered


_stage: Stage | None = None


def begin(script: Script, name: str) -> Stage:
    """Make this process a server that replays."""
    global _stage  # noqa: PLW0603 - remote functions find a process's state by its module
    _stage = Stage(script, name)
    return _stage


def current() -> Stage | None:
    """Return what this process replays; None if nothing."""
    return _stage


def present() -> Stage:
    """Return what this process replays.

    Raises:
        WorkloadError: it does not replay.
    """
    if _stage is None:
        raise WorkloadError("this process replays nothing", where="trial")
    return _stage


def set_wire(wire: Wire) -> None:
    """Tell this process what the trial's own network takes for a call to it."""
    present().pace.wire = wire


def echo(sent: torch.Tensor, size_bytes: int, sleep_s: float) -> Any:
    """Do what an answer takes, and return so many bytes after so long: what calibration calls."""
    arrived = time.perf_counter()
    reply = reply_of(TensorShape(shape=(size_bytes,), dtype=torch.uint8), told(sent), attached=False)
    sleep_until(arrived + sleep_s)
    return reply


def _part(contract: Contract | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return which part of the state a call touches; empty where it may be all of it."""
    given = None if contract is None else contract.part_of(args, kwargs)
    return "" if given is None else repr(given)
