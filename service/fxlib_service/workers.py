"""The workers that the service knows: when each was last heard from, and its hardware."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from fxlib.spec.labels import may_run, show_labels
from fxlib_service.clock import Clock
from fxlib_service.ledger import Ledger
from fxlib_service.stores.base import Worker

_SHOWN: Final = 5
_FORGET_S: Final = 7 * 24 * 3600.0
_STORE_EVERY_S: Final = 60.0
_SHARE_EVERY_S: Final = 15.0


class Workers:
    """The known workers, by id. They are stored, and survive a restart of the service.

    Args:
        ledger: gives access to the store.
        shared: whether other services have workers in the same store: then this one stores what it hears every 15
            seconds, and `recall` brings what the others heard.
        live_s: seconds of silence after which a worker no longer counts as live.
        clock: stamps what is stored, and judges its age.
        steady: returns a time that never jumps, in seconds, by which silence is measured.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        live_s: float,
        shared: bool = False,
        clock: Clock | None = None,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._live_s = live_s
        self._shared = shared
        self._store_every_s = _SHARE_EVERY_S if shared else _STORE_EVERY_S
        self._clock = clock or Clock()
        self._steady = steady
        self._workers: dict[str, Worker] = {}
        self._heard_at: dict[str, float] = {}
        self._stored_at: dict[str, float] = {}

    async def recall(self) -> None:
        """Load the stored workers, but those that this service has heard from later."""
        stored = await self._ledger.read(self._ledger.store.workers)
        now, wall = self._steady(), self._clock.now()
        for worker in stored:
            heard_at = now - max(0.0, wall - worker.seen_at)
            if heard_at > self._heard_at.get(worker.id, -math.inf):
                self._workers[worker.id], self._heard_at[worker.id] = worker, heard_at

    async def see(self, worker: Worker) -> None:
        """Record a worker's description of itself; it is stored when it changed, and now and then otherwise."""
        now, wall = self._steady(), self._clock.now()
        known = self._workers.get(worker.id)
        self._workers[worker.id] = replace(worker, seen_at=wall)
        self._heard_at[worker.id] = now
        same = known is not None and replace(known, seen_at=0.0) == replace(worker, seen_at=0.0)
        if same and now - self._stored_at.get(worker.id, -math.inf) < self._store_every_s:
            return
        self._stored_at[worker.id] = now
        self._forget(now - _FORGET_S)
        forgotten = self._clock.before(_FORGET_S)
        await self._ledger.write(self._ledger.store.see, replace(worker, seen_at=wall), forget_before=forgotten)

    async def touch(self, worker_id: str) -> None:
        """Record that a worker was just heard from."""
        if worker_id in self._workers and self._shared:
            await self.see(self._workers[worker_id])
        elif worker_id in self._workers:
            self._workers[worker_id] = replace(self._workers[worker_id], seen_at=self._clock.now())
            self._heard_at[worker_id] = self._steady()

    def live(self) -> list[Worker]:
        """Return the workers that were heard from within `live_s`, sorted by id."""
        since = self._steady() - self._live_s
        heard = [worker for worker in list(self._workers.values()) if self._heard_at[worker.id] >= since]
        return sorted(heard, key=lambda worker: worker.id)

    def hardware(self, torch_version: str, where: Mapping[str, str]) -> set[str]:
        """Return the hardware fingerprints of the live workers with this torch version, and all labels of `where`.

        While none is live, the fingerprint of the one that was seen last stands for them.
        """
        live = {worker.hardware for worker in self.live() if _could_take(worker, torch_version, where)}
        if live:
            return live
        fitting = [worker for worker in self._workers.values() if _could_take(worker, torch_version, where)]
        return {max(fitting, key=lambda worker: self._heard_at[worker.id]).hardware} if fitting else set()

    def missing(self, torch_version: str, where: Mapping[str, str]) -> str:
        """Say why no live worker could take a job of this torch version that may run `where`; "" if one could."""
        live = [worker for worker in self.live() if worker.torch_version == torch_version]
        if not live:
            return f"no live worker has torch {torch_version} yet"
        if any(may_run(where, worker.labels) for worker in live):
            return ""
        there = {f"{key}={worker.labels[key]}" for worker in live for key in where if key in worker.labels}
        shown = ", ".join(sorted(there)[:_SHOWN]) + (", ..." if len(there) > _SHOWN else "")
        found = f"there are {shown}" if there else f"none has the label {' or '.join(sorted(where)[:_SHOWN])}"
        return f"no live worker has {show_labels(where)} yet; {found}"

    def _forget(self, before: float) -> None:
        self._workers = {name: worker for name, worker in self._workers.items() if self._heard_at[name] >= before}
        self._heard_at = {name: at for name, at in self._heard_at.items() if name in self._workers}
        self._stored_at = {name: at for name, at in self._stored_at.items() if name in self._workers}


def _could_take(worker: Worker, torch_version: str, where: Mapping[str, str]) -> bool:
    return worker.torch_version == torch_version and may_run(where, worker.labels)
