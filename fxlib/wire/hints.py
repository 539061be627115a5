"""Type annotations of nodes, as far as they are simple; any other is left out."""

from __future__ import annotations

import types
import typing
from typing import Any

import torch

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault, Limits, excess

_PLAIN: dict[str, Any] = {
    **{cls.__name__: cls for cls in (bool, bytes, complex, dict, float, int, list, object, str, tuple)},
    **{f"torch.{cls.__name__}": cls for cls in (torch.Tensor, torch.Size, torch.device, torch.dtype)},
    **{name: getattr(torch, name) for name in ("SymInt", "SymFloat", "SymBool")},
    "torch.futures.Future": torch.futures.Future,
    "None": type(None),
    "...": ...,
    "typing.Any": typing.Any,
}
_GENERIC: dict[str, Any] = {
    **{cls.__name__: cls for cls in (dict, list, tuple)},
    "typing.Dict": typing.Dict,  # noqa: UP006 - not the same annotation as dict
    "typing.List": typing.List,  # noqa: UP006
    "typing.Sequence": typing.Sequence,
    "typing.Tuple": typing.Tuple,  # noqa: UP006
    "typing.Union": typing.Union,
}
_UNION = "|"
_NAMES = {id(value): name for name, value in _PLAIN.items()}
_ALIASES = {
    _GENERIC[name].__origin__: name for name in _GENERIC if name.startswith("typing.") and name != "typing.Union"
}


def write_hint(hint: pb.TypeHint, annotation: object) -> bool:
    """Write an annotation; False, with the message in an undefined state, if it is not a simple one."""
    if (name := _NAMES.get(id(annotation))) is not None:
        hint.name = name
        return True
    origin = typing.get_origin(annotation)
    if isinstance(annotation, types.UnionType):
        hint.name = _UNION
    elif origin is typing.Union:
        hint.name = "typing.Union"
    elif isinstance(annotation, types.GenericAlias):
        name = annotation.__origin__.__name__
        hint.name = name if _GENERIC.get(name) is origin else ""
    else:
        hint.name = _ALIASES.get(origin, "")
    arguments = typing.get_args(annotation)
    return bool(hint.name and arguments) and all(write_hint(hint.arguments.add(), each) for each in arguments)


def check_hint(hint: pb.TypeHint, limits: Limits, depth: int = 1) -> None:
    """Raise Fault unless the annotation is one that `write_hint` can write."""
    if depth > limits.nesting:
        raise excess("nesting of an annotation", depth, limits.nesting, "nesting")
    if hint.name != _UNION and hint.name not in (_GENERIC if hint.arguments else _PLAIN):
        raise Fault(f"unknown annotation {hint.name[:80]!r}")
    if hint.name == _UNION and len(hint.arguments) < 2:
        raise Fault("a union of fewer than two annotations")
    for each in hint.arguments:
        check_hint(each, limits, depth + 1)


def read_hint(hint: pb.TypeHint) -> Any:
    """Return the annotation. `check_hint` has passed it.

    Raises:
        Fault: Python refuses this combination.
    """
    if not hint.arguments:
        return _PLAIN[hint.name]
    arguments = tuple(read_hint(each) for each in hint.arguments)
    try:
        if hint.name == _UNION:
            result = arguments[0]
            for each in arguments[1:]:
                result = result | each
            return result
        return _GENERIC[hint.name][arguments]
    except TypeError as error:
        raise Fault(f"no such annotation: {error}") from None
