"""Rewrite rules of the user's own, for the passes of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from fxlib.cli.factory import called
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from fxlib.rules import Rule

Step: TypeAlias = tuple[str, dict[str, object]]

_PASS = "rewrite_rules"
_HINT = "Write pkg.mod:function, for a function that takes nothing and returns a list of fxlib.Rule."


def with_rules(passes: Sequence[Step], name: str | None) -> list[Step]:
    """Return the passes, those that rewrite by rules with the rules that the user's function returns.

    Args:
        passes: names and options.
        name: "pkg.mod:function", imported and called in this process; None: there are no rules.

    Raises:
        FxlibError: there is no such function, it returns no rules, or no pass takes them.
        PassError: one of them is no rule.
    """
    if name is None:
        return list(passes)
    if not any(step == _PASS for step, _ in passes):
        raise FxlibError(f"no pass takes them; add --pass {_PASS}", where=f"--rules {name}")
    rules = _rules(name)
    return [(step, {**options, "rules": rules} if step == _PASS else options) for step, options in passes]


def _rules(name: str) -> tuple[Rule, ...]:
    from fxlib.rules import Rule

    made = called(name, f"--rules {name}", _HINT)
    if not (isinstance(made, (list, tuple)) and made and all(isinstance(each, Rule) for each in made)):
        raise FxlibError(f"returned {made!r}", where=f"--rules {name}", hint=_HINT)
    return tuple(made)
