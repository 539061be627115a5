"""Which blobs a namespace has: those that it uploaded whole, and those that answers gave to it.

Blobs are stored once, whoever sent them. To another namespace one does not exist until it has sent all its bytes
itself, so that nobody learns what others have, or names what he has not got. A caller of no namespace has all.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxlib.v1 import jobs_pb2
from fxlib_service.admission import Admission
from fxlib_service.blobs.base import Blob
from fxlib_service.ledger import Ledger


class Holdings:
    """The store's table of them.

    Args:
        ledger: whose store has the table.
        admission: reads which blobs an answer names.
        kept: whether namespaces are kept apart; if not, nothing is written.
    """

    def __init__(self, ledger: Ledger, admission: Admission, *, kept: bool) -> None:
        self._ledger = ledger
        self._admission = admission
        self._kept = kept

    async def missing(self, namespace: str | None, blobs: Mapping[str, int]) -> set[str]:
        """Return those of some blobs, sizes by SHA-256, that do not exist for a namespace, wherever they lie."""
        if namespace is None:
            return set()
        return blobs.keys() - await self._ledger.read(self._ledger.store.held, namespace, list(blobs))

    async def has(self, namespace: str | None, sha256: str) -> bool:
        """Whether a blob, if it is here, exists for a namespace."""
        return not await self.missing(namespace, {sha256: 0})

    async def bytes_of(self, namespace: str) -> int:
        """Return how large the blobs of a namespace are together."""
        return await self._ledger.read(self._ledger.store.held_bytes, namespace)

    async def add(self, namespace: str, blob: Blob) -> None:
        """Note that a namespace has uploaded a blob."""
        await self._ledger.write(self._ledger.store.hold, namespace, {blob.sha256: blob.size})

    async def give(self, namespace: str, result: jobs_pb2.JobResult) -> None:
        """Note that an answer gives its graphs, with their weights, to a namespace; before the answer is told."""
        if self._kept and (named := await self._admission.blobs_of_answer(result)):
            await self._ledger.write(self._ledger.store.hold, namespace, named)
