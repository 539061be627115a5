"""Replies row by row, for contracts that name keys: a row has other bits once its key was written, and only then."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch

from fxlib.spec.contract import Contract
from fxlib.spec.profile import Result, TensorShape
from fxlib_workers.trial.replay.history import WriteHistory
from fxlib_workers.trial.replay.replies import made_rows

_MIX: Final = -7046029254386353131
"""An odd number whose multiples, in 64 bits, look like drawn ones: 2^64 divided by the golden ratio (Knuth)."""
_SHIFT: Final = 29
_ANY: Final = "*"
_INTEGERS: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class KeyedWrites:
    """What has been written under each key. It may be used by several threads.

    Attributes:
        others: the writes that do not tell their keys.
    """

    def __init__(self) -> None:
        """Begin without a write."""
        self.others = WriteHistory()
        self._lock = threading.Lock()
        self._written: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        """By resource and part, the number that the last write of each key has left."""

    def visible_to(self, contract: Contract, part: str, rows: torch.Tensor, seed: bytes) -> torch.Tensor:
        """Return a number for each row of a read: of its keys, what was written under them, and the seed of the call.

        Args:
            contract: the read's.
            part: the part of the state that it reads; empty: all of it.
            rows: its keys, with a dimension more than those of its rows where a row has several.
            seed: decides all of its rows.
        """
        keys = rows.reshape(-1).tolist()
        with self._lock:
            known = [
                [each.get(key, 0) for key in keys]
                for (name, other), each in sorted(self._written.items())
                if (name in contract.reads or _ANY in (name, *contract.reads)) and (part in ("", other) or not other)
            ]
        numbers = _mixed(rows.reshape(-1).to(torch.int64) + _number(seed))
        for each in known:  # a key that was never written has 0 here, which leaves its row as it is
            numbers = numbers + _mixed(torch.tensor(each, dtype=torch.int64))
        numbers = _mixed(numbers)
        return _mixed(numbers.view(rows.shape).flatten(1).sum(1)) if rows.dim() > 1 else numbers

    def write(self, contract: Contract | None, call: bytes, part: str, keys: torch.Tensor | None) -> None:
        """Add the digest of a call that has ended, if it writes: under its keys, or under all."""
        if contract is not None and not contract.writes:
            return
        if contract is None or keys is None:
            self.others.write(contract, call, part)
            return
        number = _number(call)
        with self._lock:
            for name in contract.writes:
                written = self._written[name, part]
                for key in set(keys.reshape(-1).tolist()):
                    before = written.get(key, 0)
                    # The order of writes that commute must not show.
                    written[key] = _signed(before + number) if contract.commutes else hash((before, number))


def keys_of(contract: Contract | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the keys of a call; None where it has none that rows can be told apart by."""
    if contract is None or contract.keys is None:
        return None
    found = contract.keys_of(tuple(args), kwargs)
    return found if isinstance(found, torch.Tensor) and found.dtype in _INTEGERS and found.dim() else None


def rows_of(
    contract: Contract | None, returns: Result, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the keys of the rows that a read is answered with; None where it is answered as a whole."""
    keys = keys_of(contract, args, kwargs)
    if keys is None or contract is None or contract.writes or not _has_rows(returns):
        return None
    return keys


def without_keys(contract: Contract, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what else a call was sent."""
    rest = [each for place, each in enumerate(args) if place != contract.keys_at]
    return rest, {name: each for name, each in kwargs.items() if name != contract.keys}


def make_rows(returns: Result, numbers: torch.Tensor) -> torch.Tensor:
    """Make up a row for each number: equal numbers give equal bits."""
    assert _has_rows(returns)  # noqa: S101 - `rows_of` has looked
    return made_rows(numbers, returns.shape[1:], returns.dtype)


def _has_rows(returns: Result) -> TypeGuard[TensorShape]:
    return isinstance(returns, TensorShape) and bool(returns.shape) and not returns.dtype.is_complex


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    multiplied = numbers * _MIX
    return multiplied ^ (multiplied >> _SHIFT)


def _signed(number: int) -> int:
    """Return a number as 64 bits have it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)
