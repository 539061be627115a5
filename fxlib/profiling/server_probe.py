"""Probes a server: with an empty call, a large transfer, equal reads at the same time, and reads in a batch.

It only calls functions of `fxlib.batch`, and reads that the program itself makes, with the program's own arguments.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from fxlib import batch
from fxlib.errors import FxlibError
from fxlib.runtime import functions, ops
from fxlib.spec.profile import CallProfile, ServerProfile

TOGETHER = (2, 4, 8, 16, 32)
"""Numbers of equal reads that are sent at the same time."""
IN_A_BATCH = 8
PAYLOAD_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of large transfers, in bytes; the first that takes long enough is used."""
ASSUMED_BYTES_PER_S = 1e9
"""Bandwidth in bytes per second that is assumed if no transfer was large enough to measure it."""

_REPEATS = 5
_PAIRS = 9
_MAX_NOTE = 200
_LONG_ENOUGH_S = 5e-3
_PATIENCE_S = 1.0
"""Seconds; if reads take longer than this together, no greater number of them is sent."""
_SAMPLE_S = 0.5
"""Seconds after which a measurement is not repeated, since a long one is accurate enough alone."""
_SATURATED = 0.6
_OVERHEAD = 0.25
"""Largest share of a read's service time that is attributed to this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A call of the program that changes nothing on its server, with its last arguments."""

    to: Any
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout_s: float | None
    batchable: bool
    batched_by: str | None = None
    request_bytes: int = 0
    response_bytes: int = 0

    def issue(self) -> Any:
        """Issue the call again."""
        return ops.issue_call(self.to, self.function, self.args, self.kwargs, self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The profile of a server, and notes on what could not be measured of it."""

    server: ServerProfile
    notes: tuple[str, ...]


def probe(name: str, calls: list[CallProfile], read: Read | None, *, recorded: bool = False) -> Probed:
    """Probe a server; this takes a few seconds at most.

    Args:
        name: the RPC name of the server.
        calls: the measured calls to it, each alone in flight.
        read: the longest of these calls that changes nothing; None if there is none.
        recorded: whether distributed autograd records the program's calls.
    """
    notes: list[str] = []
    least_s = min((call.service_s.least for call in calls), default=0.0)
    round_trip_s = _measured_or_noted(lambda: _round_trip_s(name), notes, f"{name}: no empty call")
    if round_trip_s is None:
        round_trip_s, bytes_per_s = least_s, None
    else:
        bytes_per_s = _measured_or_noted(lambda: _bytes_per_s(name, round_trip_s), notes, f"{name}: no large transfer")
    rate = bytes_per_s or ASSUMED_BYTES_PER_S
    size = round(median(call.response_bytes for call in calls)) if calls else 0
    per_call_s = _measured_or_noted(
        lambda: _per_call_s(name, size, rate, recorded=recorded), notes, f"{name}: no calls together"
    )
    concurrency, per_item_s, per_turn_s = 1, None, None
    if read is None:
        notes.append(f"{name}: no call is known to change nothing, so none was repeated to see how many run at once")
    else:
        concurrency = _measured_or_noted(lambda: _concurrency(read), notes, f"{name}: no reads together") or 1
        if read.batchable:
            per_item_s = _measured_or_noted(
                lambda: _per_item_s(name, read, rate), notes, f"{name}: no reads in a batch"
            )
            if per_item_s is not None:
                turn = partial(_per_item_s, name, read, rate, in_turn=True)
                per_turn_s = _measured_or_noted(turn, notes, f"{name}: no reads in turn")
        else:
            notes.append(f"{name}: {read.function} is not declared batchable, so no batch of it was tried")
    server = ServerProfile(
        name=name,
        round_trip_s=round_trip_s,
        concurrency=concurrency,
        bytes_per_s=rate,
        per_item_s=per_item_s,
        per_call_s=per_call_s,
        per_turn_s=per_turn_s,
    )
    return Probed(server=server, notes=tuple(notes))


def unprobed(name: str, calls: list[CallProfile], why: str) -> Probed:
    """Describe a server from the measured calls alone."""
    server = ServerProfile(
        name=name,
        round_trip_s=min((call.service_s.least for call in calls), default=0.0),
        concurrency=1,
        bytes_per_s=ASSUMED_BYTES_PER_S,
    )
    return Probed(server=server, notes=(f"{name}: {why}, so it was not probed",))


def _measured_or_noted(probing: Callable[[], Any], notes: list[str], what: str) -> Any:
    """Return a figure, or note why there is none: a server may lack fxlib, or fail under more calls than usual."""
    try:
        return probing()
    except Exception as error:  # noqa: BLE001 - whatever a server answers, the profile goes on
        words = " ".join(str(error).split("Traceback")[0].split())  # the server's message, without its location
        notes.append(f"{what}: {type(error).__name__}: {words[:_MAX_NOTE]}")
        return None


def _round_trip_s(name: str) -> float:
    def empty() -> object:
        return rpc.rpc_sync(name, batch.run, args=([],))

    empty()
    return median(_seconds(empty) for _ in range(4 * _REPEATS))


def _bytes_per_s(name: str, round_trip_s: float) -> float:
    rate = 0.0
    for size in PAYLOAD_BYTES:
        payload = torch.zeros(size, dtype=torch.uint8)

        def echo(payload: torch.Tensor = payload) -> object:
            return rpc.rpc_sync(name, batch.echo, args=(payload,))

        seconds = min(_seconds(echo) for _ in range(3)) - round_trip_s
        rate = 2 * size / max(seconds, 1e-6)
        if seconds > _LONG_ENOUGH_S:
            break
    return rate


def _concurrency(read: Read) -> int:
    """Return how many equal reads the server works on at once.

    Two reads at the same time show how much each further read costs this process, not the server: if the server works
    on both at once, they take hardly longer than one.
    """
    alone_s = _least_s(lambda: _together_s(read, 1), _REPEATS)
    overhead_s, most = 0.0, 1.0
    for count in TOGETHER:
        seconds = _least_s(partial(_together_s, read, count), _REPEATS)
        if count == TOGETHER[0]:
            overhead_s = min(max(seconds - alone_s, 0.0), _OVERHEAD * alone_s)
        own_s = max(seconds - (count - 1) * overhead_s, alone_s)
        at_once = count * alone_s / own_s
        most = max(most, at_once)
        if at_once < _SATURATED * count or seconds > _PATIENCE_S:
            break
    return round(most)


def _per_item_s(name: str, read: Read, bytes_per_s: float, *, in_turn: bool = False) -> float:
    """Return the seconds that one more read adds to a batch, without the transfer of its bytes.

    The reads of the batch run in parallel, or else one after another, in the batched form that their function declares.
    """
    function = functions.resolve(read.function)
    alone_s = _together_s(read, 1)
    most = min(IN_A_BATCH, int(_PATIENCE_S / alone_s))
    if most < 2:
        raise FxlibError(f"one takes {alone_s:.2g} s")
    serve, form = _serving(read) if in_turn else (batch.run, ())

    def together(count: int) -> Callable[[], object]:
        # Each call has arguments of its own, since shared ones would travel once. It is also a batch that the server
        # gets used to: the server learns from the first how long each call takes.
        calls = [(function, *copy.deepcopy((read.args, read.kwargs))) for _ in range(count)]
        return lambda: rpc.rpc_sync(name, serve, args=(*form, calls))

    carried_s = (read.request_bytes + read.response_bytes) / bytes_per_s
    return max(0.0, _usual_difference_s(together(1), together(most)) / (most - 1) - carried_s)


def _serving(read: Read) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that runs reads one after another, and its arguments before them."""
    if read.batched_by is None:
        return batch.run_in_order, ()
    return batch.run_batched, (functions.resolve(read.batched_by),)


def _per_call_s(name: str, size: int, bytes_per_s: float, *, recorded: bool) -> float:
    """Return the seconds that a call adds to others in flight if it only carries the usual result there and back.

    The transfer itself is left out; both directions are busy at once. If distributed autograd records calls, on both
    sides and in the thread that brings the answer, the time includes this.
    """
    floats = torch.float32.itemsize
    payload = torch.zeros(-(-size // floats), requires_grad=True) if recorded else torch.zeros(size, dtype=torch.uint8)

    def together(count: int) -> None:
        for future in [rpc.rpc_async(name, batch.echo, args=(payload,)) for _ in range(count)]:
            future.wait()

    with dist_autograd.context() if recorded else nullcontext():
        more_s = _usual_difference_s(partial(together, 1), partial(together, IN_A_BATCH))
    return max(0.0, more_s / (IN_A_BATCH - 1) - size / bytes_per_s)


def _together_s(read: Read, count: int) -> float:
    def together() -> None:
        for future in [read.issue() for _ in range(count)]:
            future.wait()

    return _seconds(together)


def _least_s(measure: Callable[[], float], repeats: int) -> float:
    """Return the shortest of several measurements, or of fewer if one takes long."""
    least_s, spent_s = math.inf, 0.0
    for _ in range(repeats):
        found_s = measure()
        least_s, spent_s = min(least_s, found_s), spent_s + found_s
        if spent_s > _SAMPLE_S:
            break
    return least_s


def _usual_difference_s(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return by how many seconds the second takes longer: the median over pairs, since a disturbance affects both."""
    one(), other()
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < _PAIRS and (not found or time.perf_counter() - start <= _SAMPLE_S):
        one_s = _seconds(one)
        found.append(_seconds(other) - one_s)
    return median(found)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
