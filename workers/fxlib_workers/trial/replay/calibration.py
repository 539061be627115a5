"""What the network of a trial takes by itself, so that replay adds only what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import Final

import torch
from torch.distributed import rpc

from fxlib import batch
from fxlib.profiling.single_call import arrival
from fxlib_workers.trial.replay import server as stage
from fxlib_workers.trial.replay.latency_model import Wire
from fxlib_workers.trial.replay.plan import Line, Script

_CALLS: Final = 15
_SLEEP_S: Final = 1e-3
"""A call that sleeps is late by what waking up takes, as replayed calls are."""

_ITEMS: Final = 12
"""Of a batch: fewer than a server works on at once."""

_WORTH_BYTES: Final = 1 << 16
"""Smaller messages cost what empty ones cost."""

_MOST_BYTES: Final = 1 << 24


def calibrate(script: Script, servers: Iterable[str]) -> None:
    """Measure the way from this process to each server and back, nothing else in flight, and tell the server."""
    lines = [line for calls in script.lines.values() for line in calls.values()]
    for name in servers:
        wire = _wire_to(name, [line for line in lines if line.to in ("", name)])
        rpc.rpc_sync(name, stage.set_wire, (wire,))


def _wire_to(server: str, lines: list[Line]) -> Wire:
    call_s, item_s = _trip_s(server, 0, 0), _item_s(server)
    request = min(_MOST_BYTES, max((line.request_bytes for line in lines), default=0))
    response = min(_MOST_BYTES, max((line.response_bytes for line in lines), default=0))
    if request + response < _WORTH_BYTES:
        return Wire(call_s=call_s, item_s=item_s)
    loaded_s = _trip_s(server, request, response)
    return Wire(call_s=call_s, byte_s=max(0.0, loaded_s - call_s) / (request + response), item_s=item_s)


def _trip_s(server: str, request_bytes: int, response_bytes: int) -> float:
    """Return the median of the seconds from the end of an issue to the arrival of the answer, without the sleep."""
    sent = torch.zeros(request_bytes, dtype=torch.uint8)
    trips = []
    for _ in range(_CALLS):
        future = rpc.rpc_async(server, stage.echo, (sent, response_bytes, _SLEEP_S))
        issued = time.perf_counter()
        arrived = arrival(future)
        assert arrived is not None  # noqa: S101 - a future tells
        trips.append(arrived - issued - _SLEEP_S)
    return max(0.0, median(trips))


def _item_s(server: str) -> float:
    """Return the seconds that each further call adds to a batch whose calls do nothing but sleep, side by side."""

    def trip_s(count: int) -> float:
        # Each with a tensor of its own: what several calls share travels once.
        calls: list[batch.Call] = [
            (stage.echo, (torch.zeros(1, dtype=torch.uint8), 1, _SLEEP_S), {}) for _ in range(count)
        ]
        begun = time.perf_counter()
        rpc.rpc_sync(server, batch.run, (calls,))
        return time.perf_counter() - begun

    trip_s(_ITEMS)  # the server learns from the first how long such a call takes
    one_s, all_s = (median(trip_s(count) for _ in range(_CALLS)) for count in (1, _ITEMS))
    return max(0.0, (all_s - one_s) / (_ITEMS - 1))
