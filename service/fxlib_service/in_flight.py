"""Limits what is in flight through the service: calls, and the bytes of requests, uploads and answers.

Once gRPC is asked for a message, it assembles the whole message in memory; before that, it holds a few KiB. So room is
reserved for each message before gRPC is asked for it: at first as much as for the largest message that gRPC lets
through, since nobody knows the size yet, and after its arrival as much as its own size. The size of a message that is
not small counts for a second longer than its call, whatever the outcome, so that a tenant takes no more than its share
in a second and leaves time for others. Answers have a budget of their own, so that requests and answers never wait for
each other in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Final

from fxlib_service.config import MIB, Limits
from fxlib_service.errors import Code, ServiceError
from fxlib_service.fair_budget import FairBudget, Held

_SMALL_BYTES: Final = 64 << 10
_LARGER_BYTES: Final = {
    "OptimizerService/Optimize": 4 * MIB,  # profiles have a line for each call of a program, workloads some for a batch
    "BlobService/FindMissing": 1 * MIB,
    "BlobService/Write": 8 * MIB,
    "WorkerService/Claim": 1 * MIB,
    "WorkerService/Complete": 8 * MIB,
}
"""Sizes in bytes of the largest messages, by method; messages of all other methods have at most `_SMALL_BYTES`."""

_BRIEF: Final = frozenset(
    {
        *(f"OptimizerService/{each}" for each in ("GetJob", "ListJobs", "CancelJob", "ReportLive")),
        *("OptimizerService/GetCapabilities", "OptimizerService/ListPasses"),
    }
)
"""Methods that wait only for the store: calls of one tenant take turns with those of others."""
_FINDING: Final = "BlobService/FindMissing"
"""The method that waits for the store of the blobs, too: its turns are its own, since a bucket may be slow or away."""
_TURNS: Final = 8

_LEAST_BYTES_PER_S: Final = 256 << 10
_PATIENCE_S: Final = 30.0
_TURN_S: Final = 10.0
_UPLOAD_TURN_S: Final = 30.0
_LINGER_S: Final = 1.0
"""Seconds for which the bytes of a request that is not small count after its call."""


class InFlight:
    """The budgets of one service process.

    Args:
        limits: the limits on messages, calls and bytes.

    Attributes:
        calls: open calls, streams included.
        requests: bytes of requests that are being received, decoded or handled.
        uploads: bytes of uploads, each open upload counting as the largest message.
        answers: bytes of answers that are being sent.
        turns: calls handled at once, among those that wait only for the store.
    """

    def __init__(self, limits: Limits) -> None:
        self._largest_bytes = limits.message_bytes
        third = limits.in_flight_bytes // 3
        self.calls = FairBudget("calls", total=limits.calls, share=limits.calls // 2, waiting=0)
        self.requests, self.uploads, self.answers = (
            FairBudget(name, total=third, share=third // 2, waiting=limits.calls)
            for name in ("bytes of requests", "bytes of uploads", "bytes of answers")
        )
        self.turns, self._finding = (
            FairBudget("calls at once", total=_TURNS, share=_TURNS // 2, waiting=limits.calls) for _ in range(2)
        )

    def call(self, tenant: str) -> AbstractAsyncContextManager[Held]:
        """Count a call as open for the duration of the block.

        Raises:
            ServiceError: SERVICE_BUSY.
        """
        return self.calls.hold(tenant, 1)

    def turn(self, method: str, tenant: str) -> AbstractAsyncContextManager[object]:
        """Wait for a tenant's turn and keep it for the duration of the block, if the method takes turns.

        The service works in the order of turns, not of calls: a tenant that makes many calls at once waits for itself.
        """
        if method == _FINDING:
            return self._finding.hold(tenant, 1)
        return self.turns.hold(tenant, 1) if method in _BRIEF else nullcontext()

    @asynccontextmanager
    async def request(self, method: str, tenant: str, read: Callable[[], Awaitable[object]]) -> AsyncIterator[bytes]:
        """Receive the one message of a call by `read`, and count its bytes for the duration of the block.

        The generator that gRPC iterates with would keep the message, as part of a reference cycle.

        Raises:
            ServiceError: SERVICE_BUSY; CALL_TIMEOUT if the message does not arrive; MESSAGE_TOO_LARGE; INVALID_REQUEST
                if the client sends none.
        """
        async with self.requests.hold(tenant, self._largest_bytes, wait_s=_TURN_S) as held:
            held.linger_s = _LINGER_S
            data = await self._arrived(method, read)
            held.shrink(len(data))
            if len(data) <= _SMALL_BYTES:
                held.linger_s = 0.0
            self._check(method, len(data))
            yield data

    @asynccontextmanager
    async def upload(
        self, method: str, tenant: str, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Receive the messages of a stream one after another. The stream counts as one message of the largest size.

        Raises:
            ServiceError: SERVICE_BUSY; while iterating, also CALL_TIMEOUT if the first message does not arrive, and
                MESSAGE_TOO_LARGE.
        """

        async def checked(received: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            first = await self._arrived(method, partial(anext, received, None))
            self._check(method, len(first))
            yield first
            async for data in received:
                self._check(method, len(data))
                yield data

        async with self.uploads.hold(tenant, self._largest_bytes, wait_s=_UPLOAD_TURN_S):
            received = aiter(messages)
            try:
                yield checked(received)
            finally:
                await _forgotten(received)

    async def send(self, tenant: str, data: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Send a message of an answer, and count its bytes until the client has taken them.

        That time has no limit, since gRPC keeps the bytes until the client takes them or goes away. A client that takes
        none fills its tenant's share and delays nobody else's answers.

        Raises:
            ServiceError: SERVICE_BUSY.
        """
        async with self.answers.hold(tenant, len(data), wait_s=_TURN_S):
            await write(data)

    async def ending(self, tenant: str, size: int) -> Callable[[object], None]:
        """Count the bytes of the message that ends a call, as `send` does, until the returned function is called.

        Raises:
            ServiceError: SERVICE_BUSY.
        """
        held = self.answers.hold(tenant, size, wait_s=_TURN_S)
        await held.take()
        return lambda _: held.give_back()

    async def _arrived(self, method: str, read: Callable[[], Awaitable[object]]) -> bytes:
        allowed_s = _time_for(_limit(method))
        try:
            async with asyncio.timeout(allowed_s):
                data = await read()
        except TimeoutError:
            problem = f"the request did not arrive within {allowed_s:g} s"
            raise ServiceError(Code.CALL_TIMEOUT, problem, retry_after_s=1.0) from None
        if not isinstance(data, bytes):  # the end of the stream
            raise ServiceError(Code.INVALID_REQUEST, "the call has no message")
        return data

    def _check(self, method: str, size: int) -> None:
        limit = min(_limit(method), self._largest_bytes)
        if size > limit:
            problem = f"a message of {method} may have {limit} bytes, and this one has {size}"
            raise ServiceError(Code.MESSAGE_TOO_LARGE, problem, metadata={"limit": "message", "bytes": str(limit)})


async def _forgotten(received: AsyncIterator[bytes]) -> None:
    """Make gRPC forget the last message that it received.

    The generator with which gRPC yields messages holds it and is part of a reference cycle. Without this, each message
    would stay until Python's next full garbage collection, which may come gigabytes later.
    """
    if isinstance(received, AsyncGenerator):
        await received.aclose()


def _limit(method: str) -> int:
    return _LARGER_BYTES.get(method, _SMALL_BYTES)


def _time_for(size: int) -> float:
    """Return the seconds within which a message of this size in bytes must have arrived."""
    return _PATIENCE_S + size / _LEAST_BYTES_PER_S
