"""The workers that the service knows: when each was last heard from, and its hardware."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fxlib_service.ledger import Ledger
from fxlib_service.stores.base import Worker

_FORGET_S: Final = 7 * 24 * 3600.0
_STORE_EVERY_S: Final = 60.0


class Workers:
    """The known workers, by id. They are stored, and survive a restart of the service.

    Args:
        ledger: gives access to the store.
        live_s: seconds of silence after which a worker no longer counts as live.
        clock: returns the time, in seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, *, live_s: float, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._live_s = live_s
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._stored_at: dict[str, float] = {}

    async def recall(self) -> None:
        """Load the stored workers."""
        self._workers = {worker.id: worker for worker in await self._ledger.read(self._ledger.store.workers)}

    async def see(self, worker: Worker) -> None:
        """Record a worker's description of itself; it is stored when it changed, and once a minute otherwise."""
        now = self._clock()
        known = self._workers.get(worker.id)
        self._workers[worker.id] = replace(worker, seen_at=now)
        same = known is not None and replace(known, seen_at=0.0) == replace(worker, seen_at=0.0)
        if same and now - self._stored_at.get(worker.id, 0.0) < _STORE_EVERY_S:
            return
        self._stored_at[worker.id] = now
        self._forget(now - _FORGET_S)
        await self._ledger.write(self._ledger.store.see, replace(worker, seen_at=now), forget_before=now - _FORGET_S)

    def touch(self, worker_id: str) -> None:
        """Record that a worker was just heard from."""
        if worker_id in self._workers:
            self._workers[worker_id] = replace(self._workers[worker_id], seen_at=self._clock())

    def live(self) -> list[Worker]:
        """Return the workers that were heard from within `live_s`, sorted by id."""
        since = self._clock() - self._live_s
        return sorted(
            (worker for worker in list(self._workers.values()) if worker.seen_at >= since), key=lambda w: w.id
        )

    def hardware(self, torch_version: str) -> set[str]:
        """Return the hardware fingerprints of the live workers with this torch version.

        While none is live, the fingerprint of the one that was seen last stands for them.
        """
        live = {worker.hardware for worker in self.live() if worker.torch_version == torch_version}
        if live:
            return live
        fitting = [worker for worker in self._workers.values() if worker.torch_version == torch_version]
        return {max(fitting, key=lambda worker: worker.seen_at).hardware} if fitting else set()

    def _forget(self, before: float) -> None:
        self._workers = {worker.id: worker for worker in self._workers.values() if worker.seen_at >= before}
        self._stored_at = {name: at for name, at in self._stored_at.items() if name in self._workers}
