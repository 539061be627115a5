"""What has been written to a replaying server: digests in place of its state, by the resources of contracts."""

from __future__ import annotations

import threading
from typing import Final

from fxlib.spec.contract import Contract
from fxlib_workers.trial.replay.replies import combined

_ANY: Final = "*"
_MODULUS: Final = 1 << 128
_NOTHING: Final = b""


class WriteHistory:
    """The writes so far. It may be used by several threads.

    A call without a contract may write everything on the server. The digests of writes that commute are added up, so
    that their order does not show; all others are chained, separately for each part of a resource.
    """

    def __init__(self) -> None:
        """Begin without a write."""
        self._lock = threading.Lock()
        self._all = _NOTHING
        self._chained: dict[str, dict[str, bytes]] = {}
        self._summed: dict[str, int] = {}
        self._known: dict[tuple[str, bool], bytes] = {}
        """The digests of resources, cached until the next write."""

    def visible_to(self, contract: Contract | None, part: str = "") -> bytes:
        """Return the digest of all that a call may read; writes to other state, or to other parts, do not change it."""
        if contract is not None and contract.pure:
            return _NOTHING
        with self._lock:
            if contract is None or _ANY in contract.reads | contract.writes:
                return self._whole()
            # A write that commutes must not show which others of its kind came before it.
            blind = contract.writes if contract.commutes else frozenset[str]()
            names = sorted(contract.reads | (frozenset() if part else contract.writes))
            return combined(self._all, *(self._resource(name, blind=name in blind) for name in names))

    def write(self, contract: Contract | None, call: bytes, part: str = "") -> None:
        """Add the digest of a call that has ended, if it writes: to one part of its resources, or to all of them."""
        if contract is not None and not contract.writes:
            return
        with self._lock:
            self._add(contract, call, part)
            self._known.clear()

    def digest(self) -> str:
        """Return one digest of everything."""
        with self._lock:
            return self._whole().hex()

    def _add(self, contract: Contract | None, call: bytes, part: str) -> None:
        if contract is None or _ANY in contract.writes:
            self._all = combined(self._whole(), call)
            self._chained.clear()
            self._summed.clear()
            return
        for name in contract.writes:
            if contract.commutes:
                self._summed[name] = (self._summed.get(name, 0) + int.from_bytes(call, "big")) % _MODULUS
            elif part:
                parts = self._chained.setdefault(name, {})
                parts[part] = combined(parts.get(part, _NOTHING), b"\0", call)
            else:
                self._chained[name] = {_ANY: combined(self._resource(name, blind=False), call)}
                self._summed.pop(name, None)

    def _whole(self) -> bytes:
        names = sorted(self._chained.keys() | self._summed.keys())
        return combined(self._all, *(self._resource(name, blind=False) for name in names))

    def _resource(self, name: str, *, blind: bool) -> bytes:
        if (known := self._known.get((name, blind))) is not None:
            return known
        summed = 0 if blind else self._summed.get(name, 0)
        parts = (
            combined(part.encode(), b"\0", written) for part, written in sorted(self._chained.get(name, {}).items())
        )
        found = self._known[name, blind] = combined(name.encode(), b"\0", *parts, summed.to_bytes(16, "big"))
        return found
