"""Deletes jobs that finished long ago, and blobs that no job names any more.

A blob counts as used whenever its presence is asked for (`BlobStore.size`): before an upload, when a job that names it
is accepted, and when it is read. So a launcher that learns that it need not upload a blob has the whole retention time
to name it in a job. A blob is deleted only if it is still unused at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fxlib_service.blobs.base import BlobStore
from fxlib_service.clock import Clock
from fxlib_service.ledger import Ledger
from fxlib_service.named_blobs import NamedBlobs
from fxlib_service.stores.base import Payloads

_AT_ONCE: Final = 100
"""Largest number of jobs that one transaction deletes, since all writes of the service wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The numbers of jobs and blobs that a sweep has deleted."""

    jobs: int
    blobs: int

    @property
    def some(self) -> bool:
        """Whether anything was deleted."""
        return bool(self.jobs or self.blobs)


class Retention:
    """Deletes jobs and blobs that have been kept long enough, whenever `sweep` is called.

    Args:
        ledger: gives access to the jobs.
        blobs: the store of the blobs.
        clock: judges the age of jobs.
        keep_s: time for which a job is kept after it finished, in seconds.
        spare_s: least time for which a blob that no job names is kept after its last use, in seconds.
        count: is called with the numbers that each sweep has deleted.
    """

    def __init__(
        self,
        ledger: Ledger,
        blobs: BlobStore,
        *,
        keep_s: float,
        spare_s: float,
        count: Callable[[Forgotten], None],
        clock: Clock | None = None,
    ) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._clock = clock or Clock()
        self._keep_s = keep_s
        self._unused_s = max(keep_s, spare_s)
        self._count = count

    async def sweep(self) -> Forgotten:
        """Delete what is due, and return how much was deleted.

        Raises:
            ServiceError: STORAGE_FULL or STORAGE_UNAVAILABLE.
        """
        jobs = await self._forget_jobs(self._clock.before(self._keep_s))
        found = Forgotten(jobs=jobs, blobs=await self._delete_blobs())
        self._count(found)
        return found

    async def _forget_jobs(self, finished_before: float) -> int:
        total = 0
        while True:
            store = self._ledger.store
            gone = await self._ledger.write(store.forget, finished_before=finished_before, limit=_AT_ONCE)
            total += gone
            if gone < _AT_ONCE:
                return total

    async def _delete_blobs(self) -> int:
        unused = await asyncio.to_thread(self._blobs.unused, older_than_s=self._unused_s)
        if not unused:
            return 0
        reader, named, after = NamedBlobs(self._blobs.read_all), set[str](), 0
        while page := await self._ledger.read(self._ledger.store.payloads, after=after, limit=_AT_ONCE):
            named |= await asyncio.to_thread(_named_in, page, reader)
            after = page[-1].number
        deleted = 0
        for sha256 in unused:
            if sha256 in named:
                await asyncio.to_thread(
                    self._blobs.size, sha256
                )  # counts as a use, so that the next sweep need not look for it again
            else:
                gone = await asyncio.to_thread(self._blobs.delete, sha256, older_than_s=self._unused_s)
                if gone:
                    await self._ledger.write(self._ledger.store.release, sha256)
                deleted += gone
        return deleted


def _named_in(page: Sequence[Payloads], named: NamedBlobs) -> set[str]:
    """Return the blobs that jobs name."""
    found = set[str]()
    for job in page:
        found |= named.in_request(job.request)
        if job.result is not None:
            found |= named.in_result(job.result)
    return found
