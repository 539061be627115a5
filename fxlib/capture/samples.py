"""Sample inputs as `torch.export` takes them: bound to the parameters of the forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxlib.errors import CaptureError
from fxlib.spec.inputs import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    """The names of the arguments in generated code, in order."""
    starred: tuple[str, ...] = ()
    """The names of those that the forward takes by `**`, whose order it sees."""


Given = Sequence[Any] | Mapping[str, Any] | Batch
_SINGLETONS = (None, True, False)


def bind(forward: Callable[..., Any], given: Given, fixed: Mapping[str, Any]) -> Samples:
    """Bind samples (by position, name or both) and arguments fixed by `concrete_args` to the forward's parameters.

    Leading parameters become positional, so that a run may pass them either way.

    Raises:
        CaptureError: the samples do not fit the parameters.
    """
    if isinstance(given, torch.Tensor):
        raise CaptureError("sample_inputs is one tensor", hint="Pass a sequence of the arguments: [x].")
    signature = inspect.signature(forward)
    positional, named = _split(given)
    try:
        bound = signature.bind(*positional, **{**fixed, **named})
    except TypeError as error:
        raise CaptureError(
            f"the samples do not fit the forward: {error}",
            where="sample_inputs",
            hint=f"It takes {signature}.",
        ) from None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    names: list[str] = []
    starred: tuple[str, ...] = ()
    gap = False
    for parameter in signature.parameters.values():
        if parameter.name not in bound.arguments:
            gap = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            values = bound.arguments[parameter.name]
            args += values
            names += [f"{parameter.name}_{index}" for index in range(len(values))]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= bound.arguments[parameter.name]
            starred = tuple(bound.arguments[parameter.name])
        elif gap or parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = bound.arguments[parameter.name]
        else:
            args.append(bound.arguments[parameter.name])
            names.append(parameter.name)
    return Samples(args=tuple(args), kwargs=kwargs, names=(*names, *kwargs), starred=starred)


def arguments_given(forward: Callable[..., Any], given: Given) -> frozenset[str]:
    """Return the names of the arguments that the samples give."""
    positional, named = _split(given)
    return frozenset([*list(inspect.signature(forward).parameters)[: len(positional)], *named])


def left_at_defaults(forward: Callable[..., Any], given: Given) -> dict[str, Any]:
    """Return the arguments that the samples leave at their defaults, if these are None, True or False."""
    names = arguments_given(forward, given)
    parameters = inspect.signature(forward).parameters.values()
    left = (each for each in parameters if each.name not in names)
    return {each.name: each.default for each in left if any(each.default is one for one in _SINGLETONS)}


def _split(given: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Batch):
        return tuple(given.inputs), dict(given.kwargs)
    return ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
