"""Records which blobs each namespace has: those that it uploaded completely, and those that its answers refer to.

A blob is stored once, whoever uploaded it. For a namespace, it exists only after that namespace has uploaded all of its
bytes, so that no namespace can learn what others have, or refer to bytes that it does not know. A caller that is not
bound to a namespace has all blobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fxlib.v1 import jobs_pb2
from fxlib_service.admission import Admission
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.ledger import Ledger


class Holdings:
    """The store's table of namespaces and their blobs.

    Args:
        ledger: gives access to the store.
        admission: reads which blobs an answer refers to.
        kept: whether namespaces are isolated; if not, nothing is recorded.

    Attributes:
        kept: whether namespaces are isolated.
    """

    def __init__(self, ledger: Ledger, admission: Admission, *, kept: bool) -> None:
        self._ledger = ledger
        self._admission = admission
        self.kept = kept

    async def missing(self, namespace: str | None, blobs: Mapping[str, int]) -> set[str]:
        """Return which of `blobs`, sizes by SHA-256, a namespace lacks, whether or not the service has them."""
        if namespace is None:
            return set()
        return blobs.keys() - await self._ledger.read(self._ledger.store.held, namespace, list(blobs))

    async def has(self, namespace: str | None, sha256: str) -> bool:
        """Return whether a namespace has a blob, provided that the service has it."""
        return not await self.missing(namespace, {sha256: 0})

    async def bytes_of(self, namespace: str, *, besides: Collection[str]) -> int:
        """Return the total size in bytes of the blobs that a namespace has besides some, given by their SHA-256s."""
        return await self._ledger.read(self._ledger.store.held_bytes, namespace, besides=besides)

    async def add(self, namespace: str, blob: CheckedBlob) -> None:
        """Record that a namespace has uploaded a blob."""
        await self._ledger.write(self._ledger.store.hold, namespace, {blob.sha256: blob.size})

    async def give(self, namespace: str, result: jobs_pb2.JobResult) -> None:
        """Record that a namespace has an answer's graphs with their weights; called before the answer is stored."""
        if self.kept and (named := await self._admission.blobs_of_answer(result, namespace)):
            await self._ledger.write(self._ledger.store.hold, namespace, named)
