"""The workers that the service knows, with the time that each was last heard from, and its hardware.

The total size of their descriptions is limited. Beyond the limit, workers of the caller with the most description bytes
are forgotten, those heard from longest ago first, so that a caller that invents workers makes nobody else's disappear.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from fxlib.spec.labels import may_run, show_labels
from fxlib_service.clock import Clock
from fxlib_service.ledger import Ledger
from fxlib_service.stores.base import Worker

_SHOWN: Final = 5
_MOST_BYTES: Final = 4 << 20
"""Approximate limit in bytes on all descriptions together; GetCapabilities returns all live workers in one message."""
_BYTES_EACH: Final = 200
"""The number of bytes that is counted for each description in addition to its texts."""
_FORGET_S: Final = 7 * 24 * 3600.0
_STORE_EVERY_S: Final = 60.0
_SHARE_EVERY_S: Final = 15.0


class Workers:
    """The known workers, by id. They are stored, and survive a restart of the service.

    Args:
        ledger: gives access to the store.
        shared: whether other services have workers in the same store. If so, this one stores what it has heard every 15
            seconds, and `recall` loads what the others have heard.
        live_s: seconds of silence after which a worker no longer counts as live.
        clock: timestamps stored descriptions, and judges their age.
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
        self._principals: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    async def recall(self) -> None:
        """Load the stored workers, except those that this service has heard from since."""
        stored = await self._ledger.read(self._ledger.store.workers)
        now, wall = self._steady(), self._clock.now()
        for worker in stored:
            heard_at = now - max(0.0, wall - worker.seen_at)
            if heard_at > self._heard_at.get(worker.id, -math.inf):
                self._workers[worker.id], self._heard_at[worker.id] = worker, heard_at
                self._sizes[worker.id] = _size(worker)

    async def see(self, worker: Worker, principal: str = "") -> None:
        """Record a worker's description of itself, and the caller that it belongs to.

        It is stored when it has changed, and otherwise from time to time.
        """
        now, wall = self._steady(), self._clock.now()
        known = self._workers.get(worker.id)
        self._workers[worker.id] = replace(worker, seen_at=wall)
        self._heard_at[worker.id] = now
        self._principals[worker.id] = principal
        same = known is not None and replace(known, seen_at=0.0) == replace(worker, seen_at=0.0)
        if same and now - self._stored_at.get(worker.id, -math.inf) < self._store_every_s:
            return
        self._stored_at[worker.id] = now
        self._sizes[worker.id] = _size(worker)
        self._forget([name for name, at in self._heard_at.items() if at < now - _FORGET_S])
        gone = self._too_many()
        self._forget(gone)
        forgotten = self._clock.before(_FORGET_S)
        await self._ledger.write(
            self._ledger.store.see, replace(worker, seen_at=wall), forget_before=forgotten, gone=gone
        )

    async def touch(self, worker_id: str) -> None:
        """Record that a worker was just heard from."""
        if worker_id in self._workers and self._shared:
            await self.see(self._workers[worker_id], self._principals.get(worker_id, ""))
        elif worker_id in self._workers:
            self._workers[worker_id] = replace(self._workers[worker_id], seen_at=self._clock.now())
            self._heard_at[worker_id] = self._steady()

    def live(self) -> list[Worker]:
        """Return the workers that were heard from within `live_s`, sorted by id."""
        since = self._steady() - self._live_s
        heard = [worker for worker in list(self._workers.values()) if self._heard_at[worker.id] >= since]
        return sorted(heard, key=lambda worker: worker.id)

    def hardware(self, torch_version: str, where: Mapping[str, str]) -> set[str]:
        """Return the hardware fingerprints of the live workers with this torch version and all labels of `where`.

        While none is live, the fingerprint of the worker seen last stands for them.
        """
        live = {worker.hardware for worker in self.live() if _could_take(worker, torch_version, where)}
        if live:
            return live
        fitting = [worker for worker in self._workers.values() if _could_take(worker, torch_version, where)]
        return {max(fitting, key=lambda worker: self._heard_at[worker.id]).hardware} if fitting else set()

    def missing(self, torch_version: str, where: Mapping[str, str]) -> str:
        """Return why no live worker could take a job of this torch version that may run `where`; "" if one could."""
        live = [worker for worker in self.live() if worker.torch_version == torch_version]
        if not live:
            return f"no live worker has torch {torch_version} yet"
        if any(may_run(where, worker.labels) for worker in live):
            return ""
        there = {f"{key}={worker.labels[key]}" for worker in live for key in where if key in worker.labels}
        shown = ", ".join(sorted(there)[:_SHOWN]) + (", ..." if len(there) > _SHOWN else "")
        found = f"there are {shown}" if there else f"none has the label {' or '.join(sorted(where)[:_SHOWN])}"
        return f"no live worker has {show_labels(where)} yet; {found}"

    def _too_many(self) -> list[str]:
        """Return the workers to forget, so that the descriptions of the others fit."""
        left, gone = sum(self._sizes.values()), list[str]()
        if left <= _MOST_BYTES:
            return gone
        of = self._principals.get
        taken = Counter[str]()
        for name, size in self._sizes.items():
            taken[of(name, "")] += size
        longest_ago = sorted(self._sizes, key=lambda name: self._heard_at[name], reverse=True)
        while left > _MOST_BYTES:
            most = taken.most_common(1)[0][0]
            name = next(each for each in reversed(longest_ago) if of(each, "") == most)
            longest_ago.remove(name)
            taken[most] -= self._sizes[name]
            left -= self._sizes[name]
            gone.append(name)
        return gone

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            for known in (self._workers, self._heard_at, self._stored_at, self._principals, self._sizes):
                known.pop(name, None)


def _size(worker: Worker) -> int:
    """Return the approximate size of a worker's description, in bytes."""
    texts = (worker.id, worker.torch_version, worker.hardware, worker.fxlib_version, worker.containment)
    labels = (text for label in worker.labels.items() for text in label)
    return _BYTES_EACH + sum(len(text.encode()) for text in (*texts, *worker.allowed_modules, *labels))


def _could_take(worker: Worker, torch_version: str, where: Mapping[str, str]) -> bool:
    return worker.torch_version == torch_version and may_run(where, worker.labels)
