"""The futures that a forward gets in place of those of calls that it would have issued, and that were made ahead.

If a call that was made ahead has failed, the wait makes it again as the program makes it, so that its error, if any, is
the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from typing_extensions import override

from fxlib import batch
from fxlib.runtime.ops.batches import BatchInFlight, issue_batch
from fxlib.runtime.tracking.flow_control import DEADLINES

Merge: TypeAlias = Callable[[Sequence[Any]], list[Any] | None]
"""A function that puts rows that were read again into the results of calls; it returns None if that is impossible."""


class TakenCall:
    """A call that was made ahead and replaces one that its forward has just issued."""

    __slots__ = ("_again", "_future", "_merged")

    ran_ahead = True
    """Tells a recording that the call was not issued here."""

    def __init__(self, future: Any, again: Callable[[], Any], merged: Merge | None) -> None:
        self._future, self._again, self._merged = future, again, merged

    def wait(self) -> Any:
        """Return the result; if there is none, make the call now as the program makes it, and return its result."""
        found: Sequence[Any] | None = None
        with suppress(Exception):  # the program has not asked for the result yet
            found = [self._future.wait()]
        DEADLINES.forget(self._future)
        if found is not None and self._merged is not None:
            found = self._merged(found)
        if found is not None:
            return found[0]
        return self._again()

    def done(self) -> bool:
        """Whether the call has been answered."""
        return bool(self._future.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(future)` once the call has been answered."""
        self._future.add_done_callback(callback)


class LaterCall:
    """A call whose result is known once pushes in flight are settled; it replaces one that a forward has issued."""

    __slots__ = ("_make", "_settle", "_take")

    ran_ahead = True

    def __init__(self, take: Callable[[], Any], settle: Callable[[], None], make: Callable[[], Any]) -> None:
        self._take, self._settle, self._make = take, settle, make

    def wait(self) -> Any:
        """Return the result; if there is none, make the call now, and return its result."""
        self._settle()
        taken = self._take()
        return self._make() if taken is None else taken.wait()

    def done(self) -> bool:
        """Whether the call has been answered, which is not known here."""
        return False


class LaterBatch(BatchInFlight):
    """The same as `LaterCall`, for calls in one message."""

    ran_ahead = True

    def __init__(self, take: Callable[[], Any], settle: Callable[[], None], arguments: tuple[Any, ...]) -> None:
        super().__init__(*arguments[:3], in_order=False)
        self._take, self._settle, self._arguments = take, settle, arguments

    @override
    def _receive(self) -> list[Any]:
        self._settle()
        found: BatchInFlight = self._take() or issue_batch(*self._arguments)
        return found._receive()


class TakenBatch(BatchInFlight):
    """Calls that were made ahead in one message; if one failed, all are made again, as the program makes them."""

    ran_ahead = True

    def __init__(
        self,
        flying: BatchInFlight,
        arguments: tuple[Any, ...],
        merged: Merge | None,
        made_again: Callable[[], None],
    ) -> None:
        super().__init__(*arguments[:3], in_order=False)
        self.future, self.refused = flying.future, flying.refused
        self._merged, self._made_again = merged, made_again

    @override
    def _receive(self) -> list[Any]:
        if self.refused is not None:
            self._made_again()
            return super()._receive()
        assert self.future is not None  # noqa: S101 - it was sent
        landed: Sequence[Any] | None = None
        with suppress(Exception):  # the single calls raise the error
            landed = self.future.wait()
        DEADLINES.forget(self.future)
        if landed and self._merged is not None and not batch.any_failed(landed):
            landed = self._merged(landed)
        if landed and not batch.any_failed(landed):
            return list(landed)
        self._made_again()
        return self._one_by_one()
