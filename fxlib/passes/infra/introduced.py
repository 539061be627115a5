"""Operators that a pass may put into a program although the program does not call them.

Names are those of `fxlib.analysis.operators.operator_names`. A pass that declares nothing may put in any plain work:
what is known to draw no numbers, to write nothing, and to make no tensor of nothing but literals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fxlib.analysis.operators.operator_names import labels_of, names_of
from fxlib.runtime.ops.registry import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """The operators that a pass may put in.

    Attributes:
        operators: names of operators.
        namespaces: namespaces of torch's dispatcher, all of whose operators it may put in.
        in_place: whether it may have operators that are there write over what they are given.
        plain: whether it may put in any plain work: it has not declared which.
    """

    operators: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    in_place: bool = False
    plain: bool = False

    @classmethod
    def of(cls, *targets: object, in_place: bool = False) -> Introduced:
        """Declare functions, and methods by their names."""
        return cls(operators=names_of(*targets), in_place=in_place)

    @classmethod
    def with_roles(cls, *roles: Role) -> Introduced:
        """Declare operators of fxlib's own, by their roles in the registry."""
        return cls(operators=labels_of(roles))

    @classmethod
    def all_of(cls, each: Iterable[Introduced]) -> Introduced:
        """Return what several passes may put in together."""
        found = list(each)
        return cls(
            operators=frozenset().union(*(one.operators for one in found)),
            namespaces=frozenset().union(*(one.namespaces for one in found)),
            in_place=any(one.in_place for one in found),
            plain=any(one.plain for one in found),
        )

    def __or__(self, other: Introduced) -> Introduced:
        """Return what both may put in."""
        return Introduced.all_of((self, other))

    def allows(self, name: str, there: Collection[str]) -> bool:
        """Whether an operator may be in the program that was made of one that calls those that are `there`."""
        if name in there or name in self.operators or name.partition("::")[0] in self.namespaces:
            return True
        return self.in_place and name.endswith("_") and self.allows(name[:-1], there)


NOTHING = Introduced()
ANY_PLAIN_WORK = Introduced(plain=True)
