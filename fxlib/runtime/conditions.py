"""What a capture is true of, and a rewrite with it: checked before each forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from torch import nn

from fxlib.runtime.looks import Looks
from fxlib.runtime.reading import Reading
from fxlib.runtime.ties import Ties
from fxlib.runtime.walk import local_modules

Parameter = tuple[str, Any]
"""Name and default of an argument; the name is empty where the graph asserts the value."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, complex, str, tuple, type(None))
_GRAD_MODE = frozenset({"is_grad_enabled", "set_grad_enabled", "enable_grad"})
"""Functions by which a forward behaves otherwise where no gradients are recorded, besides recording none."""
_ALWAYS = frozenset({"inplace", "max_norm"})
"""Attributes of torch's own modules that decide what may move past them."""


@dataclass(frozen=True, slots=True)
class _Fact:
    """`owner.name` is `value`; `table` is the one of the owner's that holds it, or empty for its plain attributes."""

    owner: nn.Module
    table: str
    name: str
    value: Any

    def held_in(self) -> dict[str, Any]:
        attributes = self.owner.__dict__
        return attributes[self.table] if self.table else attributes

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


@dataclass(slots=True)
class _Watched:
    """The facts, laid out so that one pass in C compares them all."""

    tables: list[dict[str, Any]]
    names: list[str]
    values: list[Any]
    unhooked: list[Mapping[int, Any]] = field(default_factory=list)
    hooked: list[tuple[Mapping[int, Any], tuple[int, ...]]] = field(default_factory=list)


class Conditions:
    """What must hold for a graph to stand in for its model.

    Grad mode and the training flags of all modules; which modules there are, their hooks (those of the root run in any
    case), and that no `forward` was replaced on an instance; numbers, flags and strings that the forward's code reads
    by name; which parameters take a gradient, where it asks that; what parameters and buffers look like, where the
    graph has fixed that; and that no argument is None, True or False where it compares with these.
    """

    def __init__(self, module: nn.Module, original: nn.Module | None, *, grad_enabled: bool) -> None:
        """Note the present state of `original`, for which `module` stands in; without it, nothing is ever checked."""
        self.module = module
        self.grad_enabled = grad_enabled
        parts = [] if original is None else [each for _, each in local_modules(original)]
        reading = Reading.of(parts)
        self.singletons = reading.singletons
        self.asks_grad_mode = not _GRAD_MODE.isdisjoint(reading.names)
        self._facts = [fact for each in parts for fact in _facts(each, reading.names | _ALWAYS)]
        if parts:
            self._facts[0] = _Fact(module, "", "training", module.training)
        self._hooks = [(each, name, tuple(each.__dict__[name])) for each in parts[1:] for name in _HOOKS]
        asked = "requires_grad" in reading.names
        self._gradients = [
            (each, name, value.requires_grad) for each in parts if asked for name, value in _parameters(each)
        ]
        self._ties = Ties(module, original)
        self._looks: Looks | None = None
        self._watched: _Watched | None = None

    def fix_looks(self, original: nn.Module, *, strides: bool) -> None:
        """Hold dtypes, devices and shapes of parameters and buffers to what they are now, and maybe their strides."""
        self._looks = Looks(self.module, original, strides=strides)

    def fix_training(self, flags: Mapping[nn.Module, bool]) -> None:
        """Hold the training flags of some modules to those that the graph is for, whatever they are now."""
        self._facts = [
            replace(each, value=flags[each.owner]) if each.name == "training" and each.owner in flags else each
            for each in self._facts
        ]
        self._watched = None

    def rebased(self, module: nn.Module) -> Conditions:
        """Return the same conditions for another module that stands in for the same original."""
        twin = copy.copy(self)
        twin.module, twin._watched = module, None
        twin._ties = self._ties.rebased(module)
        twin._looks = None if self._looks is None else self._looks.rebased(module)
        if self._facts:
            twin._facts = [_Fact(module, "", "training", self._facts[0].value), *self._facts[1:]]
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Conditions:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.module = copy.deepcopy(self.module, memo)
        twin._ties, twin._looks = copy.deepcopy((self._ties, self._looks), memo)
        twin._watched = None  # a copied module has tables of its own, which may not be there yet
        twin._facts = [
            _Fact(copy.deepcopy(each.owner, memo), each.table, each.name, copy.deepcopy(each.value, memo))
            for each in self._facts
        ]
        twin._hooks = [(copy.deepcopy(each, memo), name, ids) for each, name, ids in self._hooks]
        twin._gradients = [(copy.deepcopy(each, memo), name, flag) for each, name, flag in self._gradients]
        return twin

    def broken(self, *, grad_enabled: bool) -> str:
        """Return which of them does not hold now, in words; empty if all do."""
        if grad_enabled is not self.grad_enabled:
            return f"grad mode is {'on' if grad_enabled else 'off'}, and was not at capture"
        watched = self._watched or self._watch()
        same = all(map(is_, map(dict.get, watched.tables, watched.names), watched.values))
        if not same and (changed := self._changed(watched)):
            return changed
        if any(watched.unhooked) or any(tuple(table) != ids for table, ids in watched.hooked):
            return "hooks of its modules are not those at capture"
        for each, name, flag in self._gradients:
            if each._parameters[name].requires_grad is not flag:  # type: ignore[union-attr]
                return f"requires_grad of {type(each).__name__}.{name} is {not flag}, and was {flag} at capture"
        return ""

    def other_looks(self) -> str:
        """Return which parameter or buffer does not look as the graph has it, in words; empty if all do."""
        return "" if self._looks is None else self._looks.changed()

    def reordered(self, arguments: Iterable[Any]) -> str:
        """Return why gradients may add up in another order than a rewrite kept; empty if they do not."""
        if self._ties.broken():
            return "parameters that were one at capture are not, or are one that were not"
        return shared_gradient(arguments)

    def misfit(self, parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return which argument is one of the singletons that the forward's code compares with; empty if none is."""
        if not self.singletons:
            return ""
        for index, (name, default) in enumerate(parameters):
            value = args[index] if index < len(args) else kwargs.get(name, default)
            if type(value) in self.singletons and name:
                return f"the argument {name} is {value}, and was taken for a tensor at capture: see concrete_args="
        return ""

    def _watch(self) -> _Watched:
        facts = self._facts
        watched = _Watched([each.held_in() for each in facts], [each.name for each in facts], [e.value for e in facts])
        for each, name, ids in self._hooks:
            table = each.__dict__[name]
            if ids:
                watched.hooked.append((table, ids))
            else:
                watched.unhooked.append(table)
        self._watched = watched
        return watched

    def _changed(self, watched: _Watched) -> str:
        for index, fact in enumerate(self._facts):
            now = watched.tables[index].get(fact.name)
            if now is fact.value:
                continue
            if type(now) is not type(fact.value) or not isinstance(now, _SCALARS) or now != fact.value:
                if fact.name == "training":
                    owner = type(fact.owner).__name__
                    return f"the training flag of {owner} is {now}, and was {fact.value} at capture"
                return f"{fact} is not what it was at capture"
            watched.values[index] = now  # an equal value: compared by identity from now on
        return ""


def shared_gradient(arguments: Iterable[Any]) -> str:
    """Return why these arguments' gradients may add up in another order than a rewrite kept; empty if they do not.

    The order is kept for each input by itself; a parameter, or one tensor under two names, has uses beside those.
    """
    seen: set[int] = set()
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            if isinstance(value, nn.Parameter) or id(value) in seen:
                return "an argument that takes a gradient is a parameter, or is given twice"
            seen.add(id(value))
    return ""


def parameters_of(forward: Callable[..., Any], inputs: frozenset[str]) -> tuple[Parameter, ...]:
    """Return a generated forward's parameters but for `self`; those that no input of the graph is named for are fixed.

    These were given by `concrete_args`, and the graph itself asserts their values.
    """
    found = list(inspect.signature(forward).parameters.values())[1:]
    return tuple((each.name if each.name in inputs else "", each.default) for each in found)


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)


def _facts(module: nn.Module, names: frozenset[str]) -> Iterator[_Fact]:
    yield _Fact(module, "", "training", module.training)
    yield _Fact(module, "", "forward", module.__dict__.get("forward"))
    for name, child in module._modules.items():
        yield _Fact(module, "_modules", name, child)
    for name, value in module.__dict__.items():
        if name in names and name != "training" and isinstance(value, _SCALARS):
            yield _Fact(module, "", name, value)
