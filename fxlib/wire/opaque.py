"""What stays with the client: callables, modules and attributes of which a graph holds only a name.

Without the client's own module to bind them to, they keep their place in the graph, and raise when they are called.
"""

from __future__ import annotations

import re
from collections import namedtuple
from typing import Any, NoReturn

from torch import nn

from fxlib.errors import OpaqueError
from fxlib.runtime.attributes import check_data

_NO_IDENTIFIER = re.compile(r"\W")


def _refuse(what: str, label: str) -> NoReturn:
    raise OpaqueError(
        f"{what} {label!r} is known only to the process that captured the graph",
        hint="Decode with root=, the module that was captured.",
    )


class OpaqueFunction:
    """A callable on no allow-list, by the name of its slot; with `method`, one called by name on its first argument."""

    def __init__(self, slot: str, *, method: bool = False) -> None:
        self.slot = slot
        self.method = method
        # torch.fx names what it calls in generated code by these.
        self.__name__ = self.__qualname__ = "opaque_" + _NO_IDENTIFIER.sub("_", slot)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            OpaqueError: always.
        """
        _refuse("method" if self.method else "function", self.slot)

    def __repr__(self) -> str:
        return f"OpaqueFunction({self.slot!r})"

    def __deepcopy__(self, memo: object) -> OpaqueFunction:
        return self


class OpaqueModule(nn.Module):
    """A module of a class that is not torch's own: it holds its parameters and children, and cannot be called."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._fxlib_label = label  # a name that no model gives to a part of its own

    def __getattr__(self, name: str) -> Any:
        """Answer `label`, the qualified name of the class, unless the model has a part of this name."""
        if name == "label" and not any(name in vars(self)[table] for table in ("_parameters", "_buffers", "_modules")):
            return self._fxlib_label
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            OpaqueError: always.
        """
        _refuse("module of class", self._fxlib_label)

    def extra_repr(self) -> str:
        """Show the class."""
        return self._fxlib_label


class OpaqueAttribute:
    """An attribute whose value cannot travel, such as an RRef."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __repr__(self) -> str:
        return f"OpaqueAttribute({self.slot!r})"

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used as the object that it stands for.

        Raises:
            OpaqueError: for every attribute that Python does not ask for by itself.
        """
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse("attribute", self.slot)

    def __deepcopy__(self, memo: object) -> OpaqueAttribute:
        return self


def opaque_tuple(label: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return a named tuple class that stands for the client's class `label`. The caller has checked all names.

    Its fields hold data alone: a method that a graph calls may be what the graph's writer put under the name.
    """
    plain: Any = namedtuple(label.rpartition(".")[2], fields, module=__name__)  # type: ignore[misc] # noqa: PYI024

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = plain.__new__(cls, *args, **kwargs)
        for field, item in zip(fields, made, strict=True):
            check_data(item, field)
        return made

    space = {"__slots__": (), "__new__": new, "__fxlib_label__": label, "__module__": __name__}
    return type(plain.__name__, (plain,), space)


def tuple_label(cls: type) -> str:
    """Return the label of a named tuple class."""
    return str(getattr(cls, "__fxlib_label__", None) or f"{cls.__module__}.{cls.__qualname__}")
