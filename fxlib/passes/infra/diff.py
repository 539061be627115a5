"""The changes of a pass, as a unified diff of the code that torch.fx generates before and after it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from torch.fx import Graph

MAX_LINES = 400
"""Maximum number of lines in one diff; further lines are only counted."""

MAX_COLUMNS = 500
"""Maximum number of characters in one line; a call may have thousands of arguments."""

MAX_ALIGNED = 10_000
"""Maximum number of lines that are aligned: difflib takes time quadratic in the lines that moved."""

_LETS_GO = re.compile(r";  (?:\w+ = )+None\b.*$")
_ASSIGNS = re.compile(r"^\s*(\w+)(?:\s*:[^=]+)? = ")


def code_of(graph: Graph) -> list[str]:
    """Return a graph's forward as lines of Python.

    The code omits the statements that release values after their last use, which would change wherever a use moves.
    """
    lines = graph.python_code("self").src.strip().splitlines()
    return [_LETS_GO.sub("", line).rstrip() for line in lines]


def by_name(graph: Graph) -> dict[str, str]:
    """Return the line of code that makes each value, by the name of its node."""
    found = ((_ASSIGNS.match(line), line.strip()) for line in code_of(graph))
    return {match[1]: line for match, line in found if match is not None}


def diff_of(before: Sequence[str], after: Sequence[str], *, name: str) -> str:
    """Return the unified diff of two listings; "" if they are the same.

    Beyond `MAX_ALIGNED` lines, the diff only lists added and removed lines, without their positions.

    Args:
        before: the lines before the pass.
        after: the lines after the pass.
        name: the name of the pass, for the header.
    """
    if list(before) == list(after):
        return ""
    heads = f"before {name}", f"after {name}"
    if max(len(before), len(after)) > MAX_ALIGNED:
        lines = [f"--- {heads[0]}", f"+++ {heads[1]}", *_unaligned(before, after)]
    else:
        lines = list(difflib.unified_diff(before, after, *heads, lineterm=""))
    rest = len(lines) - MAX_LINES
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 3]}..." for line in lines[:MAX_LINES]]
    return "\n".join([*shown, *([f"... and {rest:,} more lines"] if rest > 0 else [])])


def _unaligned(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Return which lines were removed and which added; the order of the others may differ."""
    had, has = set(before), set(after)
    yield f"@@ {len(before):,} lines, now {len(after):,}: their positions are not shown @@"
    yield from (f"-{line}" for line in before if line not in has)
    yield from (f"+{line}" for line in after if line not in had)
