"""Whether a read and the push of its gradient keep what they declare of keys: tried on the functions themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxlib.errors import ContractError
from fxlib.runtime.functions import name_of
from fxlib.spec.contract import Contract, contract_of
from fxlib.utils.compare import same_bits

_PUSHES = 3
"""Pushes that are made one after another: momentum and decay show from the second on."""


def check_keys(
    read: Callable[..., torch.Tensor], push: Callable[..., object], setup: Callable[[], tuple[Any, ...]]
) -> None:
    """Try a server's functions, in this process, for what `keys=` says of them.

    >>> fxlib.check_keys(my.ps.lookup, my.ps.push, lambda: (my.ps.reset(), ("users", torch.arange(100)))[1])

    Row i of a result has to depend on the keys in row i alone, a push has to change the rows of its keys alone, and a
    read may change nothing. Dense Adam, momentum or decay over all rows, and rows that are drawn as they are first
    looked up, are found. What the arguments do not show is not: give many keys, of old rows and new ones.

    Args:
        read: a function with `@fxlib.remote(reads=..., keys=...)`.
        push: the function that takes its gradient, with `@fxlib.remote(writes=..., keys=...)`: it is called as
            `fxlib.push_gradients` does, with the arguments of `read` and a gradient like its result.
        setup: puts the server's state back to the first one, and returns the arguments of a `read` of four keys or
            more, all of them different.

    Raises:
        ContractError: the functions do not keep what they declare, or declare no keys.
    """
    reads, writes = _contract(read), _contract(push)
    generator = torch.Generator().manual_seed(0)
    case = _Case(read, reads, setup)
    if writes.keys_of(case.args, {}) is not case.keys:
        raise ContractError(
            f"keys={writes.keys!r} names another argument than that of {name_of(read)}", where=name_of(push)
        )
    count = len(case.keys)
    order = torch.randperm(count, generator=generator)
    some, others = order[: count // 2].sort().values, order[count // 2 :].sort().values

    first = case.begin()
    _same(first, case.read(), f"{name_of(read)} returns something else when it is called again")
    for chosen in (order, some, others, torch.cat([some, some])):
        case.begin(read=False)
        _same(first[chosen], case.read(chosen), f"a row of {name_of(read)} depends on more than its keys")
    gradients = [torch.randn(first[some].shape, generator=generator).to(first.dtype) for _ in range(_PUSHES)]

    def pushed(*, reading: torch.Tensor | None) -> torch.Tensor:
        case.begin(read=False)
        for gradient in gradients:
            if reading is not None:
                case.read(reading)
            push(*case.with_keys(some), gradient)
        return case.read()

    after = pushed(reading=None)
    _same(first[others], after[others], f"{name_of(push)} changes rows of other keys than its own")
    for chosen in (some, others, order):
        _same(after, pushed(reading=chosen), f"{name_of(read)} changes what is read later: it is no mere read")


class _Case:
    """A server's state, and the arguments of a read."""

    def __init__(
        self, read: Callable[..., torch.Tensor], contract: Contract, setup: Callable[[], tuple[Any, ...]]
    ) -> None:
        self._read, self._contract, self._setup = read, contract, setup
        self.args: tuple[Any, ...] = setup()
        keys = contract.keys_of(self.args, {})
        where, hint = name_of(read), "Have setup return the arguments of a read, by their place."
        if not isinstance(keys, torch.Tensor) or keys.is_floating_point() or keys.dim() == 0:
            raise ContractError(f"keys={contract.keys!r} is given no tensor of integers", where=where, hint=hint)
        if len(keys) < 4 or len(keys.unique()) != keys.numel():
            raise ContractError("setup should give four keys or more, all of them different", where=where)
        self.keys = keys

    def begin(self, *, read: bool = True) -> torch.Tensor:
        """Put the state back to the first one; return all rows, if they are to be read."""
        self._setup()
        return self.read() if read else torch.empty(0)

    def read(self, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the rows of some keys, or of all."""
        keys = self.keys if chosen is None else self.keys[chosen]
        found: object = self._read(*self.with_keys(chosen))
        if not isinstance(found, torch.Tensor) or found.dim() == 0 or len(found) != len(keys):
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            where = name_of(self._read)
            raise ContractError(f"{len(keys)} keys bring {shape}, and should bring as many rows", where=where)
        return found.detach().clone()

    def with_keys(self, chosen: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the arguments with some of the keys."""
        keys = self.keys.clone() if chosen is None else self.keys[chosen]
        return tuple(keys if each is self.keys else each for each in self.args)


def _contract(function: Callable[..., object]) -> Contract:
    found = contract_of(function)
    if found is None or found.keys is None:
        raise ContractError("it declares no keys", where=name_of(function), hint="@fxlib.remote(..., keys=...)")
    return found


def _same(one: torch.Tensor, other: torch.Tensor, otherwise: str) -> None:
    if not same_bits(one, other):
        rows = ""
        if one.shape == other.shape:
            differ: list[int] = (one != other).reshape(len(one), -1).any(1).nonzero().reshape(-1).tolist()
            rows = f" (rows {differ[:4]})"
        raise ContractError(
            f"{otherwise}{rows}",
            where="fxlib.check_keys",
            hint="Take keys= off, and the rows are read behind the push.",
        )
