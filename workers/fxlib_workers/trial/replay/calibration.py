"""What the network of a trial takes by itself, measured so that replay adds only the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import Final

import torch
from torch.distributed import rpc

from fxlib import batch
from fxlib.profiling.single_call import arrival
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.latency_model import NetworkCost
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan

_CALLS: Final = 15
_SLEEP_S: Final = 1e-3
"""The time that each call sleeps: waking up makes it late, as it does replayed calls."""

_ITEMS: Final = 12
"""The calls of a batch: fewer than a server works on at once."""

_WORTH_BYTES: Final = 1 << 16
"""The bytes of a call below which it costs as much as an empty one."""

_MOST_BYTES: Final = 1 << 24
"""The largest message that is measured."""


def calibrate(plan: ReplayPlan, servers: Iterable[str]) -> None:
    """Measure calls from this process to each server, with nothing else in flight, and tell the server the result."""
    recorded = [call for calls in plan.calls.values() for call in calls.values()]
    for name in servers:
        cost = _network_cost(name, [call for call in recorded if call.to in ("", name)])
        rpc.rpc_sync(name, replay_server.set_network_cost, (cost,))


def _network_cost(server: str, recorded: list[RecordedCall]) -> NetworkCost:
    call_s, item_s = _trip_s(server, 0, 0), _item_s(server)
    request = min(_MOST_BYTES, max((call.request_bytes for call in recorded), default=0))
    response = min(_MOST_BYTES, max((call.response_bytes for call in recorded), default=0))
    if request + response < _WORTH_BYTES:
        return NetworkCost(call_s=call_s, item_s=item_s)
    loaded_s = _trip_s(server, request, response)
    return NetworkCost(call_s=call_s, byte_s=max(0.0, loaded_s - call_s) / (request + response), item_s=item_s)


def _trip_s(server: str, request_bytes: int, response_bytes: int) -> float:
    """Return the median of the seconds from the end of an issue to the arrival of the answer, without the sleep."""
    sent = torch.zeros(request_bytes, dtype=torch.uint8)
    trips = []
    for _ in range(_CALLS):
        future = rpc.rpc_async(server, replay_server.echo, (sent, response_bytes, _SLEEP_S))
        issued = time.perf_counter()
        arrived = arrival(future)
        assert arrived is not None  # noqa: S101 - `arrival` waits for the future
        trips.append(arrived - issued - _SLEEP_S)
    return max(0.0, median(trips))


def _item_s(server: str) -> float:
    """Return the seconds that each further call adds to a batch whose calls only sleep, concurrently."""

    def trip_s(count: int) -> float:
        # Each call has a tensor of its own, since a tensor that several share would travel once.
        calls: list[batch.Call] = [
            (replay_server.echo, (torch.zeros(1, dtype=torch.uint8), 1, _SLEEP_S), {}) for _ in range(count)
        ]
        begun = time.perf_counter()
        rpc.rpc_sync(server, batch.run, (calls,))
        return time.perf_counter() - begun

    trip_s(_ITEMS)  # from the first batch the server learns how long such a call takes
    one_s, all_s = (median(trip_s(count) for _ in range(_CALLS)) for count in (1, _ITEMS))
    return max(0.0, (all_s - one_s) / (_ITEMS - 1))
