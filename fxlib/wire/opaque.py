"""Stand-ins for what stays with the client: callables, modules and attributes that a graph holds only by name.

Without the client's own module to bind them to, they stay in the graph and raise when they are called.
"""

from __future__ import annotations

import dataclasses
import re
from collections import namedtuple
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn

from torch import nn
from torch.distributed import rpc
from torch.utils import _pytree as pytree

from fxlib.errors import OpaqueError
from fxlib.runtime.attributes import check_data
from fxlib.v1 import graph_pb2 as pb

_MOST_RECORDS = 256
"""Maximum number of classes kept at a time, so that a reader's memory does not grow with each name it receives."""
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
        # torch.fx uses these to name the function in generated code.
        self.__name__ = self.__qualname__ = "opaque_" + _NO_IDENTIFIER.sub("_", slot)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            OpaqueError: always.
        """
        _refuse("method" if self.method else "function", self.slot)

    def __repr__(self) -> str:
        return f"OpaqueFunction({self.slot!r})"

    def __deepcopy__(self, memo: object) -> OpaqueFunction:
        return self


class OpaqueModule(nn.Module):
    """A module whose class is not torch's own: it holds its parameters and children, and cannot be called."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._fxlib_label = label  # a name that no model gives to a part of its own

    def __getattr__(self, name: str) -> Any:
        """Return `label`, the qualified name of the class, unless the model has a part of this name."""
        if name == "label" and not any(name in vars(self)[table] for table in ("_parameters", "_buffers", "_modules")):
            return self._fxlib_label
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            OpaqueError: always.
        """
        _refuse("module of class", self._fxlib_label)

    def extra_repr(self) -> str:
        """Return the name of the class."""
        return self._fxlib_label


class OpaqueAttribute:
    """An attribute whose value cannot travel."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __repr__(self) -> str:
        return f"OpaqueAttribute({self.slot!r})"

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse access to attributes of the object that it stands for.

        Raises:
            OpaqueError: for every attribute that Python does not look up by itself.
        """
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse("attribute", self.slot)

    def __deepcopy__(self, memo: object) -> OpaqueAttribute:
        return self


class OpaqueRRef(OpaqueAttribute):
    """An RRef of the client's: it knows the owner of its object, but leads nowhere."""

    def __init__(self, slot: str, owner: str, *, here: bool) -> None:
        super().__init__(slot)
        self._owner = owner
        self._here = here

    @classmethod
    def of(cls, slot: str, rref: rpc.PyRRef[Any]) -> OpaqueRRef:
        """Return a stand-in for a live RRef."""
        return cls(slot, rref.owner_name(), here=rref.is_owner())

    def owner_name(self) -> str:
        """Return the name of the owner; empty if it is unknown."""
        return self._owner

    def is_owner(self) -> bool:
        """Return whether the client itself owns the object of the RRef."""
        return self._here

    def __repr__(self) -> str:
        return f"OpaqueRRef({self.slot!r}, {self._owner!r})"


def opaque_tuple(label: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return a named tuple class that stands for the client's class `label`. The caller has checked all names.

    Its fields hold only data, since a graph's writer could put something to call under the name of a method.
    """
    plain: Any = namedtuple(label.rpartition(".")[2], fields, module=__name__)  # type: ignore[misc] # noqa: PYI024

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = plain.__new__(cls, *args, **kwargs)
        for field, item in zip(fields, made, strict=True):
            check_data(item, field)
        return made

    space = {"__slots__": (), "__new__": new, "__fxlib_label__": label, "__module__": __name__}
    return type(plain.__name__, (plain,), space)


class OpaqueContainer:
    """Stands for a container of a class that only the client has: its parts, in order, and their names.

    A part is found by its position or, if the container's context holds a list of names, by its name, as a key and as
    an attribute.
    """

    def __init__(self, label: str, parts: list[Any], context: Any) -> None:
        self.label = label
        self.parts = parts
        self.context = context

    def __getitem__(self, key: int | str) -> Any:
        """Return a part."""
        return self.parts[_names_in(self.context).index(key) if isinstance(key, str) else key]

    def __getattr__(self, name: str) -> Any:
        """Return a part by its name.

        Raises:
            AttributeError: no part has this name.
        """
        if name.startswith("__") or name in ("label", "parts", "context"):
            raise AttributeError(name)
        if name in (names := _names_in(self.context)):
            return self.parts[names.index(name)]
        plain = self.context.get("plain") if isinstance(self.context, dict) else None
        if isinstance(plain, dict) and name in plain:
            return plain[name]
        raise AttributeError(f"{self.label} has no part {name!r} here")

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"OpaqueContainer({self.label!r}, {self.parts!r})"


def _names_in(context: object) -> list[Any]:
    """Return the names of a container's parts: its context or, for dataclasses and objects, the names in it."""
    if isinstance(context, dict):
        context = context.get("parts")
    if isinstance(context, (list, tuple)):
        names = context[0] if context and isinstance(context[0], (list, tuple)) else context
        return [each for each in names if isinstance(each, str)]
    return []


def _keyed(container: OpaqueContainer) -> list[tuple[Any, Any]]:
    names = _names_in(container.context)
    if len(names) != len(container.parts):
        return [(pytree.SequenceKey(index), part) for index, part in enumerate(container.parts)]
    return [(pytree.MappingKey(name), part) for name, part in zip(names, container.parts, strict=True)]


# One class stands for all of them: a class for each label would stay in torch's registry for as long as the process.
pytree.register_pytree_node(
    OpaqueContainer,
    lambda each: (each.parts, (each.label, each.context)),
    lambda parts, known: OpaqueContainer(known[0], list(parts), known[1]),
    flatten_with_keys_fn=lambda each: (_keyed(each), (each.label, each.context)),
)


class OpaqueRecord:
    """Stands for an object of a dataclass that only the client has; subclasses are dataclasses with these fields."""

    def __init__(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):  # type: ignore[arg-type]
            check_data(value, field.name)
            setattr(self, field.name, value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@lru_cache(maxsize=_MOST_RECORDS)
def opaque_record(label: str, fields: tuple[str, ...]) -> type[Any]:
    """Return a dataclass that stands for the client's dataclass `label`. The caller has checked all names.

    Python compiles no methods for it, which would otherwise be generated from the names of fields.
    """
    space = {"__fxlib_label__": label, "__module__": __name__}
    name, typed = label.rpartition(".")[2], [(field, Any) for field in fields]
    return dataclasses.make_dataclass(
        name, typed, bases=(OpaqueRecord,), namespace=space, init=False, repr=False, eq=False, match_args=False
    )


def tuple_label(cls: type) -> str:
    """Return the label of a class of named tuples, or of a dataclass."""
    return str(getattr(cls, "__fxlib_label__", None) or f"{cls.__module__}.{cls.__qualname__}")


def handles_in(graph: pb.Graph) -> dict[str, OpaqueRRef]:
    """Return the RRefs that the root's own nodes read, by their paths, in a graph that `validate` has passed."""
    root = len(graph.modules) - 1
    targets = {node.target for node in graph.modules[root].graph.nodes if node.op == pb.OPCODE_GET_ATTR}
    children: dict[int, dict[str, int]] = {}
    attributes: dict[int, dict[str, pb.Value]] = {}
    found: dict[str, OpaqueRRef] = {}
    for path in sorted(graph.targets[index].path for index in targets):
        *steps, last = path.split(".")
        module = root
        for step in steps:
            if module not in children:
                slots = graph.modules[module].children
                children[module] = {slot.name: slot.module for slot in slots if slot.HasField("module")}
            module = children[module][step]
        if module not in attributes:
            attributes[module] = {each.name: each.value for each in graph.modules[module].attributes}
        value = attributes[module].get(last)
        if value is not None and value.WhichOneof("kind") == "handle":
            found[path] = OpaqueRRef(value.handle.slot, value.handle.owner, here=value.handle.here)
    return found
