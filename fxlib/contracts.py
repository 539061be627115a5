"""What a remote function does to the world, as its author or its caller declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fxlib.errors import ContractError

F = TypeVar("F", bound=Callable[..., object])

_ATTRIBUTE = "__fxlib_contract__"
_DECLARED: dict[str, Callable[..., object]] = {}


def _names(value: str | Iterable[str]) -> frozenset[str]:
    return frozenset([value] if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Effects of one remote function; resources are names scoped to the call's destination.

    No contract at all means: ordered with every other effect. `Contract(pure=True)` touches no state; `reads` and
    `writes` name the state that is read or written (a write may also read). `commutes`: two such writes may swap and
    leave the same bits. `gradient`: the remote function that takes this one's gradient. `batched_by`: the remote
    function that serves many of these calls at once. `returns`: the result's structure, a nest of tuples, lists and
    dicts with `None` for each leaf, so that it can be unpacked while tracing.
    """

    pure: bool = False
    reads: frozenset[str] = frozenset()
    """Given as one name, or as names in any collection."""
    writes: frozenset[str] = frozenset()
    """Given like `reads`."""
    commutes: bool = False
    gradient: str | None = None
    batched_by: str | None = None
    returns: object = None
    """Structure of the result; `None`: a single leaf or unknown."""

    def __post_init__(self) -> None:
        """Take names as they come, and refuse contradictions.

        Raises:
            ContractError: the contract is pure and yet touches state, or commutes without writing.
        """
        object.__setattr__(self, "reads", _names(self.reads))
        object.__setattr__(self, "writes", _names(self.writes))
        if self.pure and (self.reads or self.writes):
            raise ContractError(
                "a pure remote function reads and writes nothing", hint="Drop pure=, or reads= and writes=."
            )
        if self.commutes and not self.writes:
            raise ContractError("commutes= speaks of writes, and none are declared", hint="Name them with writes=.")
        if self.gradient is not None and self.returns is not None:
            raise ContractError(
                "gradient= speaks of one tensor, and returns= declares several",
                hint="Return one tensor, or drop gradient= and push by hand.",
            )
        for name in (self.gradient, self.batched_by):
            if name is not None and ":" not in name and not name.startswith("."):
                raise ContractError(
                    f"{name!r} does not name a remote function", hint='Write "package.module:function".'
                )

    @property
    def is_read(self) -> bool:
        """Whether the call changes nothing on the server, so that it may be issued early and repeated."""
        return self.pure or (bool(self.reads) and not self.writes)


PURE = Contract(pure=True)


def remote(
    *,
    pure: bool = False,
    reads: str | Iterable[str] = (),
    writes: str | Iterable[str] = (),
    commutes: bool = False,
    gradient: str | None = None,
    batched_by: str | None = None,
    returns: object = None,
) -> Callable[[F], F]:
    """Declare the contract of a remote function where it is defined.

    >>> @remote(reads="tables", gradient="my.ps:push")
    ... def lookup(table, indices): ...

    Raises:
        ContractError: the declaration contradicts itself.
    """
    contract = Contract(
        pure=pure,
        reads=_names(reads),
        writes=_names(writes),
        commutes=commutes,
        gradient=gradient,
        batched_by=batched_by,
        returns=returns,
    )

    def mark(function: F) -> F:
        target = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        setattr(target, _ATTRIBUTE, contract)
        _DECLARED[f"{target.__module__}:{target.__qualname__}"] = target
        return function

    return mark


def declared(name: str) -> Callable[..., object] | None:
    """Return the function that was marked with `@remote` under the name "package.module:qualname", or None."""
    return _DECLARED.get(name)


def contract_of(function: object) -> Contract | None:
    """Return the contract declared on a function, method or class, or None."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, Contract) else None
