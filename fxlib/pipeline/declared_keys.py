"""Check that a server's functions keep what their contracts declare of keys, by trying the functions themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxlib.batch.known_rows import KnownRows
from fxlib.errors import ContractError
from fxlib.pipeline.updates import same_known
from fxlib.runtime import functions
from fxlib.runtime.functions import name_of
from fxlib.runtime.tracking.autograd_node import as_it_is
from fxlib.spec.contract import Contract, contract_of
from fxlib.utils.compare import same_bits

_PUSHES = 3
"""Number of pushes that are made one after another: momentum and decay show from the second on."""


def check_keys(
    read: Callable[..., torch.Tensor], push: Callable[..., object], setup: Callable[[], tuple[Any, ...]]
) -> None:
    """Check, in this process, that a server's functions do what their `keys=` declares.

    >>> fxlib.check_keys(my.ps.lookup, my.ps.push, lambda: (my.ps.reset(), ("users", torch.arange(100)))[1])

    Row i of a result has to depend on the keys in row i alone, a push has to change the rows of its keys alone, and a
    read may change nothing; an update (`with_state=`, `update=`) has to make the same bits as the push. The check finds
    dense Adam, momentum or decay over all rows, and rows that are drawn when they are first looked up. It does not find
    what the arguments do not show: give many keys, of old rows and new ones.

    Args:
        read: a function with `@fxlib.remote(reads=..., keys=...)`.
        push: the function that takes its gradient, with `@fxlib.remote(writes=..., keys=...)`: it is called as
            `fxlib.push_gradients` calls it, with the arguments of `read` and a gradient of the shape of its result.
        setup: resets the server's state to the initial one, and returns the arguments of a `read` of four or more
            keys, all different.

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
            push(*case.with_keys(some), gradient.clone())
        return case.read()

    after = pushed(reading=None)
    _same(first[others], after[others], f"{name_of(push)} changes rows of other keys than its own")
    for chosen in (some, others, order):
        _same(after, pushed(reading=chosen), f"{name_of(read)} changes what is read later: it is no mere read")
    if reads.with_state is not None and writes.update is not None:
        _check_update(case, push, reads.with_state, writes.update, gradients, torch.cat([some, some[:1]]))


def _check_update(  # noqa: PLR0917 - what it checks
    case: _Case,
    push: Callable[..., object],
    with_state: str,
    update: str,
    gradients: Sequence[torch.Tensor],
    chosen: torch.Tensor,
) -> None:
    """Compare pushes made on the server with the same ones made by their update; one of the keys is named twice."""
    read_known, updated = functions.resolve(with_state), functions.resolve(update)
    first = case.begin()
    known: KnownRows = read_known(*case.with_keys(chosen))
    _same(first[chosen], known.rows, f"{with_state} returns other rows")
    settings = known.settings
    for each in gradients:
        gradient = torch.cat([each, each[:1]])
        known = updated(known, *case.with_keys(chosen), gradient.clone())
        push(*case.with_keys(chosen), gradient)
        server: KnownRows = read_known(*case.with_keys(chosen))
        where = f"{update} makes other rows of them than {name_of(push)}"
        _same(server.rows, known.rows, where)
        if not same_known(server, known):
            raise ContractError(f"{where}: their state differs", where="fxlib.check_keys")
        if known.settings != settings:
            raise ContractError(
                f"{name_of(push)} changes settings of {with_state}, which all rows share",
                where="fxlib.check_keys",
                hint="What a push changes belongs to the state of its rows: a step count of each row, for instance.",
            )


class _Case:
    """A server's state, and the arguments of a read."""

    def __init__(
        self, read: Callable[..., torch.Tensor], contract: Contract, setup: Callable[[], tuple[Any, ...]]
    ) -> None:
        self._read, self._contract, self._setup = read, contract, setup
        self.args: tuple[Any, ...] = setup()
        keys = contract.keys_of(self.args, {})
        where, hint = name_of(read), "Have setup return the arguments of a read, by position."
        if not isinstance(keys, torch.Tensor) or keys.is_floating_point() or keys.dim() == 0:
            raise ContractError(f"keys={contract.keys!r} is given no tensor of integers", where=where, hint=hint)
        if len(keys) < 4 or len(keys.unique()) != keys.numel():
            raise ContractError("setup should give four keys or more, all of them different", where=where)
        self.keys = keys

    def begin(self, *, read: bool = True) -> torch.Tensor:
        """Reset the state to the initial one; return all rows, if they are to be read."""
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
        """Return the arguments with some of the keys, which the function may write to, as a server may."""
        keys = self.keys if chosen is None else self.keys[chosen]
        return tuple(as_it_is(keys if each is self.keys else each) for each in self.args)


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
