"""Contracts: the effects of remote functions on their servers, as authors or callers declare them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fxlib.errors import ContractError

F = TypeVar("F", bound=Callable[..., object])

_ATTRIBUTE = "__fxlib_contract__"
_DECLARED: dict[str, Callable[..., object]] = {}


def _names(value: str | Iterable[str]) -> frozenset[str]:
    return frozenset([value] if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True)
class Exactly:
    """A number in `Contract.returns` that is always the same; a plain number stands for any number of its type."""

    value: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Effects of one remote function; resources are names scoped to the call's destination.

    A call without a contract stays in order with every other effect. `Contract(pure=True)` touches no state; `reads`
    and `writes` name the state that is read or written (a write may also read). `commutes`: two such writes may swap
    and leave the same bits. `part`: the argument that says which part of that state a call touches; gradients of
    different parts are taken side by side. `gradient`: the remote function that takes this one's gradient. `batchable`:
    many calls to one server may travel in one message, through `fxlib.batch`, which the server must then have
    installed. `batched_by`: the remote function that serves many of these calls at once instead: called with a list of
    (args, kwargs), it returns the list of their results. `with_state`: the remote function that reads the same rows by
    the same arguments, and returns a `fxlib.batch.KnownRows`; `update`: the pure function that returns such rows as a
    push would leave them, with the same bits as on the server; it is called with the rows and the arguments of the
    push. `returns`: the result's structure, nested tuples, lists and dicts with `None` for each leaf, so that it can be
    unpacked while tracing; or, for `torch.export`, a function of the same arguments that makes tensors of the result's
    shapes and dtypes, in that structure. In both, a flag, a string and `Exactly(3)` stand for exactly this value: the
    forward may branch on it, and each run checks it.
    """

    pure: bool = False
    reads: frozenset[str] = frozenset()
    """State that the function reads, given as one name or as a collection of names."""
    writes: frozenset[str] = frozenset()
    """State that the function writes, given like `reads`."""
    commutes: bool = False
    part: str | None = None
    part_at: int | None = None
    """Position of the argument `part` among the positional arguments, which `remote` finds; `None` if it is unknown or
    the argument is keyword-only."""
    keys: str | None = None
    keys_at: int | None = None
    """Position of the argument `keys`, like `part_at`."""
    concurrent: bool = False
    gradient: str | None = None
    batchable: bool = False
    batched_by: str | None = None
    with_state: str | None = None
    update: str | None = None
    returns: object = None
    """Structure of the result, or a function that makes tensors like the result's from the arguments of a call; `None`
    if the result is a single leaf or unknown."""

    def __post_init__(self) -> None:
        """Normalize names, and reject contradictions.

        Raises:
            ContractError: the contract is pure and yet touches state, commutes without writing, or has an invalid name.
        """
        object.__setattr__(self, "reads", _names(self.reads))
        object.__setattr__(self, "writes", _names(self.writes))
        if self.pure and (self.reads or self.writes):
            raise ContractError(
                "a pure remote function reads and writes nothing", hint="Drop pure=, or reads= and writes=."
            )
        if self.commutes and not self.writes:
            raise ContractError("commutes= applies to writes, and none are declared", hint="Name them with writes=.")
        for option, argument, position in (("part", self.part, self.part_at), ("keys", self.keys, self.keys_at)):
            if argument is not None and not argument.isidentifier():
                raise ContractError(f"{option}= names an argument, and {argument!r} is not a name")
            if position is not None and (argument is None or position < 0):
                raise ContractError(f"{option}_at={position} is not the position of an argument that {option}= names")
        self._check_keys()
        if self.gradient is not None and self.structure is not None:
            raise ContractError(
                "gradient= applies to one tensor, and returns= declares several",
                hint="Return one tensor, or drop gradient= and push by hand.",
            )
        for name in (self.gradient, self.batched_by, self.with_state, self.update):
            if name is not None and ":" not in name and not name.startswith("."):
                raise ContractError(
                    f"{name!r} does not name a remote function", hint='Write "package.module:function".'
                )

    def _check_keys(self) -> None:
        if self.keys is not None and not (self.reads or self.writes):
            raise ContractError("keys= applies to rows of a state, and none is declared", hint="Name it with reads=.")
        if self.concurrent and (self.keys is None or not self.is_read):
            raise ContractError(
                "concurrent= applies to reads by keys", hint="Name these with keys=, and write nothing."
            )
        if self.with_state is not None and (self.keys is None or not self.is_read):
            raise ContractError(
                "with_state= applies to reads by keys", hint="Name these with keys=, and write nothing."
            )
        if self.update is not None and (self.keys is None or not self.writes):
            raise ContractError("update= applies to writes by keys", hint="Name these with keys=.")

    @property
    def structure(self) -> object:
        """The structure of the result if `returns` declares it as nested containers; None for a leaf or if unknown."""
        return None if callable(self.returns) else self.returns

    @property
    def is_read(self) -> bool:
        """Whether the call changes nothing on the server, so that it may be issued early and repeated."""
        return self.pure or (bool(self.reads) and not self.writes)

    def part_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str | int | None:
        """Return the argument that says which part of the state a call touches; None if it may touch all of it.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if self.part is None or "*" in self.reads | self.writes:
            return None
        given = _argument(self.part, self.part_at, args, kwargs)
        return given if isinstance(given, str | int) else None

    def keys_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return the keys of a call; None if it has none or they cannot be determined.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        return None if self.keys is None else _argument(self.keys, self.keys_at, args, kwargs)


def _argument(name: str, position: int | None, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    return args[position] if position is not None and position < len(args) else kwargs.get(name)


PURE = Contract(pure=True)


def union(contracts: Iterable[Contract]) -> Contract:
    """Return the combined contract of several calls."""
    found = list(contracts)
    reads = frozenset(name for each in found for name in each.reads)
    writes = frozenset(name for each in found for name in each.writes)
    return Contract(pure=not (reads or writes) and all(each.pure for each in found), reads=reads, writes=writes)


def remote(
    *,
    pure: bool = False,
    reads: str | Iterable[str] = (),
    writes: str | Iterable[str] = (),
    commutes: bool = False,
    part: str | None = None,
    keys: str | None = None,
    concurrent: bool = False,
    gradient: str | None = None,
    batchable: bool = True,
    batched_by: str | None = None,
    with_state: str | None = None,
    update: str | None = None,
    returns: object = None,
) -> Callable[[F], F]:
    """Declare the contract of a remote function where it is defined.

    >>> @remote(reads="tables", gradient="my.ps:push")
    ... def lookup(table, indices): ...

    Raises:
        ContractError: the declaration contradicts itself or the function's signature.
    """
    contract = Contract(
        pure=pure,
        reads=_names(reads),
        writes=_names(writes),
        commutes=commutes,
        part=part,
        keys=keys,
        concurrent=concurrent,
        gradient=gradient,
        batchable=batchable,
        batched_by=batched_by,
        with_state=with_state,
        update=update,
        returns=returns,
    )

    def mark(function: F) -> F:
        target = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        part_at, keys_at = _position(target, "part", part), _position(target, "keys", keys)
        setattr(target, _ATTRIBUTE, replace(contract, part_at=part_at, keys_at=keys_at))
        _DECLARED[f"{target.__module__}:{target.__qualname__}"] = target
        return function

    return mark


def _position(function: Callable[..., object], option: str, name: str | None) -> int | None:
    """Return the position of an argument among the positional ones; None if it is keyword-only."""
    parameters = list(inspect.signature(function).parameters.values()) if name is not None else []
    if name is None or any(each.name == name and each.kind is each.KEYWORD_ONLY for each in parameters):
        return None
    positions = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if name in positions:
        return positions.index(name)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    where = f"{function.__module__}:{function.__qualname__}"
    raise ContractError(f"{option}={name!r} does not name an argument of the function", where=where)


def declared(name: str) -> Callable[..., object] | None:
    """Return the function that was marked with `@remote` under the name "package.module:qualname", or None."""
    return _DECLARED.get(name)


def contract_of(function: object) -> Contract | None:
    """Return the contract declared on a function, method or class, or None."""
    found = getattr(function, _ATTRIBUTE, None)
    if not isinstance(found, Contract):
        return None
    if (found.part_at or found.keys_at) and inspect.ismethod(function):  # callers do not pass the first argument
        return replace(found, part_at=_before(found.part_at), keys_at=_before(found.keys_at))
    return found


def _before(position: int | None) -> int | None:
    return position - 1 if position else position
