"""What is wrong with one value, before it is known at which node and in which field it stands."""

from __future__ import annotations

from fxlib.errors import LimitError, WireError


class Fault(Exception):  # noqa: N818 - it becomes the error
    """A fault without its place; whoever knows the place turns it into the error that a caller sees."""

    kind: type[WireError] = WireError

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self._path = ""

    def inside(self, part: str) -> None:
        """Say that all that is known so far lies in `part` of something larger: ".field", or "[index]"."""
        self._path = part + self._path

    def at(self, where: str) -> WireError:
        """Return the error that names the place, given where what the fault lies inside of stands."""
        return self.kind(self.message, where=where + self._path, hint=self.hint)


class Excess(Fault):
    """A limit that is exceeded."""

    kind = LimitError


def excess(what: str, value: int, limit: int, field: str) -> Excess:
    """Return the fault that `value` exceeds `Limits.field`."""
    return Excess(f"{what}: {value:,} exceeds the limit of {limit:,}", f"Raise Limits.{field} if this is meant.")
