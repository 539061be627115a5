"""What has been written on a replaying server: a digest in place of its state, by the resources of contracts."""

from __future__ import annotations

import threading
from typing import Final

from fxlib.spec.contract import Contract
from fxlib_workers.trial.replay.replies import joined

_ANY: Final = "*"
_MODULUS: Final = 1 << 128
_NOTHING: Final = b""


class History:
    """The writes so far. Safe for threads.

    A call without a contract may write all that the server has. Writes that commute are summed up, so that their order
    does not show; all others are chained, those to one part of a resource apart from those to another.
    """

    def __init__(self) -> None:
        """Begin with nothing written."""
        self._lock = threading.Lock()
        self._all = _NOTHING
        self._chained: dict[str, dict[str, bytes]] = {}
        self._summed: dict[str, int] = {}
        self._known: dict[tuple[str, bool], bytes] = {}
        """Digests of resources since the last write."""

    def seen(self, contract: Contract | None, part: str = "") -> bytes:
        """Digest all that a call may read: neither other state nor other parts of what it writes change it."""
        if contract is not None and contract.pure:
            return _NOTHING
        with self._lock:
            if contract is None or _ANY in contract.reads | contract.writes:
                return self._whole()
            # A write that commutes may not tell which of its like came before it.
            blind = contract.writes if contract.commutes else frozenset[str]()
            names = sorted(contract.reads | (frozenset() if part else contract.writes))
            return joined(self._all, *(self._resource(name, blind=name in blind) for name in names))

    def write(self, contract: Contract | None, call: bytes, part: str = "") -> None:
        """Take in the digest of a call that is over, if it writes: to a part of what it writes, or to all of it."""
        if contract is not None and not contract.writes:
            return
        with self._lock:
            self._take_in(contract, call, part)
            self._known.clear()

    def digest(self) -> str:
        """Return one digest of everything."""
        with self._lock:
            return self._whole().hex()

    def _take_in(self, contract: Contract | None, call: bytes, part: str) -> None:
        if contract is None or _ANY in contract.writes:
            self._all = joined(self._whole(), call)
            self._chained.clear()
            self._summed.clear()
            return
        for name in contract.writes:
            if contract.commutes:
                self._summed[name] = (self._summed.get(name, 0) + int.from_bytes(call, "big")) % _MODULUS
            elif part:
                parts = self._chained.setdefault(name, {})
                parts[part] = joined(parts.get(part, _NOTHING), b"\0", call)
            else:
                self._chained[name] = {_ANY: joined(self._resource(name, blind=False), call)}
                self._summed.pop(name, None)

    def _whole(self) -> bytes:
        names = sorted(self._chained.keys() | self._summed.keys())
        return joined(self._all, *(self._resource(name, blind=False) for name in names))

    def _resource(self, name: str, *, blind: bool) -> bytes:
        if (known := self._known.get((name, blind))) is not None:
            return known
        summed = 0 if blind else self._summed.get(name, 0)
        parts = (joined(part.encode(), b"\0", told) for part, told in sorted(self._chained.get(name, {}).items()))
        found = self._known[name, blind] = joined(name.encode(), b"\0", *parts, summed.to_bytes(16, "big"))
        return found
