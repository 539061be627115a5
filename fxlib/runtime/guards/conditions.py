"""The conditions under which a captured graph, or a rewrite of it, stands for its model; each forward checks them."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxlib.runtime.data_parallel import deciding
from fxlib.runtime.guards.backward_order import BackwardOrder
from fxlib.runtime.guards.capture_facts import Change, changed_entry, same
from fxlib.runtime.guards.dict_entries import DictEntries, Mark
from fxlib.runtime.guards.fact_table import Facts
from fxlib.runtime.guards.tensor_metadata import METADATA, TensorMetadata, TiedParameters, foreign_class
from fxlib.runtime.submodules import local_modules
from fxlib.utils.pytree import leaves

Parameter = inspect.Parameter
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torchs._global_forward_hooks,
    torchs._global_forward_pre_hooks,
    torchs._global_backward_hooks,
    torchs._global_backward_pre_hooks,
)
_SCALARS = (bool, int, float, complex, str, tuple, type(None))
_ALWAYS = frozenset({"inplace", "max_norm"})
"""Attributes of torch's own modules that decide which nodes may move past them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedAnswers:
    """The questions that a forward has asked torch during the capture; the graph is only valid for the same answers."""

    grad_mode: bool = False
    """Whether the forward has asked if gradients are recorded, or has set that."""
    requires_grad: bool = False
    """Whether the forward has asked which parameters take a gradient."""
    tensor_metadata: bool = False
    """Whether the forward has asked for dtypes, devices or shapes of parameters and buffers."""
    strides: bool = False
    """Whether the graph is bound to the strides of parameters and buffers, too."""
    classes: bool = False
    """Whether the forward has asked for the classes of parameters or buffers."""


@dataclass(frozen=True, slots=True)
class _Fact:
    """The fact that `owner.name` is `value`; `table` names the owner's table with it, and is empty for attributes."""

    owner: nn.Module
    table: str
    name: str
    value: Any

    def held_in(self) -> dict[str, Any]:
        attributes = self.owner.__dict__
        return attributes[self.table] if self.table else attributes

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fact:
        # A model has thousands of facts, and a dataclass copies itself slowly.
        owner, value = copy.deepcopy(self.owner, memo), copy.deepcopy(self.value, memo)
        return _Fact(owner, self.table, self.name, value)


@dataclass(frozen=True, slots=True)
class _Location:
    """The entry `name` in one of a module's tables of tensors, `_parameters` or `_buffers`."""

    owner: nn.Module
    table: str
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now; None if there is none."""
        return self.owner.__dict__[self.table].get(self.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """The fact that `container[key]` is `value`, and that the container has `size` entries if a size is given."""

    container: Any
    key: Any
    value: Any
    size: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the container still holds that value."""
        try:
            now = self.container[self.key]
        except (LookupError, TypeError):
            return False
        return now is self.value and (self.size is None or len(self.container) == self.size)


@dataclass(slots=True)
class _Watched:
    """The facts in a layout in which a few loops in C compare all of them."""

    entries: DictEntries = field(default_factory=DictEntries)
    facts: Sequence[_Fact] = ()
    """The facts, one for each entry."""
    unhooked: list[Mapping[int, Any]] = field(default_factory=list)
    hooked: list[tuple[Mapping[int, Any], tuple[tuple[int, Any], ...]]] = field(default_factory=list)
    plain: frozenset[int] = frozenset()


class Conditions:
    """The conditions under which a graph stands in for its model.

    These are grad mode and the training flags of all modules; the modules themselves, their hooks (those of the root
    run in any case), and that no `forward` was replaced on an instance; the Python state and the properties of
    arguments that the forward has read; which parameters take a gradient, if the forward has asked that; and the
    metadata of parameters and buffers, if the graph has fixed that.
    """

    def __init__(
        self, module: nn.Module, original: nn.Module | None, *, grad_enabled: bool, facts: Facts, asked: FixedAnswers
    ) -> None:
        """Note the present state of `original`, for which `module` stands in; without it, nothing is ever checked.

        Args:
            module: the captured module.
            original: the user's model.
            grad_enabled: whether gradients were recorded when the graph was made.
            facts: the Python state that the forward has read.
            asked: what the forward has asked of torch.
        """
        self.module = module
        self.grad_enabled = grad_enabled
        self.python = facts
        parts = [] if original is None else [each for _, each in local_modules(original)]
        self.fixed: Mapping[str, Any] = {}
        """The numbers, flags and None that arguments had at capture; the graph is valid for these values."""
        self.asks_grad_mode = asked.grad_mode
        self._original = original
        self._most, self._unnamed = _taken_by_position(original)
        self._parts, self._kinds = parts, list(map(type, parts))
        self._facts = [fact for each in parts for fact in _facts(each)]
        if parts:
            self._facts[0] = _Fact(module, "", "training", module.training)
        self._hooks = [(each, name, tuple(each.__dict__[name].items())) for each in parts[1:] for name in _HOOKS]
        tables = (*_HOOKS, "_modules")
        self._facts += [_Fact(each, "", name, each.__dict__[name]) for each in parts[1:] for name in tables]
        self._options = [(index, fact) for index, each in enumerate(parts) for fact in _options(each)]
        """Options with the indices of their modules."""
        self._calls_at_capture: Mapping[int, int] | None = None
        """How often the captured graph calls each module, by index; None before it was looked at."""
        self._constant_options: Sequence[_Fact] = ()
        """Options that the graph has as constants."""
        self._tied = list(_tied(parts))
        kinds: list[Any] = list(dict.fromkeys(self._kinds[1:]))
        self._calls = [(each, name, getattr(each, name)) for each in kinds for name in ("__call__", "_call_impl")]
        self._callers, self._calling, self._called = ([each[place] for each in self._calls] for place in range(3))
        self._recurrent = [each for each in parts if asked.strides and isinstance(each, nn.RNNBase) and _listed(each)]
        self._global_hooks = [(each, tuple(each.items())) for each in _GLOBAL_HOOKS] if parts else []
        self._gradients = [
            (each, name, value.requires_grad)
            for each in parts
            if asked.requires_grad
            for name, value in _parameters(each)
        ]
        self._tied_parameters = TiedParameters(module, original)
        self.backward_order = BackwardOrder()
        self._metadata: TensorMetadata | None = None
        self._watched: _Watched | None = None
        read = (*(METADATA if asked.tensor_metadata else ()), *(("__class__",) if asked.classes else ()))
        if original is not None:
            self._metadata = TensorMetadata(module, original, read, strides=asked.strides)
        self._entries: Sequence[Entry] = ()

    def fix_entries(self, entries: Sequence[Entry]) -> None:
        """Require that the containers which led to objects of the graph, such as RRefs, keep their present contents."""
        self._entries = entries

    def fix_options(self, called: Iterable[nn.Module], *, exported: bool) -> None:
        """Require the options, such as strides, of torch's own modules in whose place the graph has functions.

        A call of a module reads its options; a function has them as constants.

        Args:
            called: the modules that the graph calls, once for each call, with all below them.
            exported: whether the graph was exported, and so calls none of the modules that the forward has run.
        """
        if not self._options:
            return
        index = {id(each): place for place, each in enumerate(self._parts)}
        calls = Counter(index[id(each)] for each in called if id(each) in index)
        if self._calls_at_capture is None:
            self._calls_at_capture = calls
        before = self._calls_at_capture
        self._constant_options = [fact for at, fact in self._options if exported or calls[at] < before.get(at, 0)]
        self._watched = None

    def fix_training(self, flags: Mapping[nn.Module, bool]) -> None:
        """Require the given training flags of some modules, whatever the flags are now."""
        self._facts = [
            replace(each, value=flags[each.owner]) if each.name == "training" and each.owner in flags else each
            for each in self._facts
        ]
        self._watched = None

    def rebased(self, module: nn.Module) -> Conditions:
        """Return the same conditions for another module that stands in for the same original."""
        copied = copy.copy(self)
        copied.module, copied._watched = module, None
        copied._tied_parameters = self._tied_parameters.rebased(module)
        copied._metadata = None if self._metadata is None else self._metadata.rebased(module)
        if self._facts:
            copied._facts = [_Fact(module, "", "training", self._facts[0].value), *self._facts[1:]]
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Conditions:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        copied._tied_parameters, copied._metadata = copy.deepcopy((self._tied_parameters, self._metadata), memo)
        copied._original = copy.deepcopy(self._original, memo)  # before the facts, which look for copies in the memory
        copied.python = copy.deepcopy(self.python, memo)
        copied._watched = None  # a copied module has tables of its own, which may not be there yet
        copied._parts = copy.deepcopy(self._parts, memo)
        copied._facts, copied._options, copied._constant_options = copy.deepcopy(
            (self._facts, self._options, self._constant_options), memo
        )
        copied._hooks, copied._tied, copied._recurrent, copied._gradients = copy.deepcopy(
            (self._hooks, self._tied, self._recurrent, self._gradients), memo
        )
        return copied

    @property
    def unhooked(self) -> Collection[int]:
        """The ids of the original's modules without hooks or a `forward` of their own, which hold the same modules.

        This is so while no condition is broken. There are none if hooks of all modules existed at capture.
        """
        return (self._watched or self._watch()).plain

    @property
    def are_facts_alone(self) -> bool:
        """Whether the forward decided by Python's state alone: nothing about arguments, grad mode, or tensors."""
        asked = (self.asks_grad_mode, self._gradients, self.fixed, self._entries, self._recurrent)
        reads = self._metadata is not None and self._metadata.reads
        return not any(asked) and not reads and not self.python.asks_arguments

    @property
    def training(self) -> bool:
        """The training flag of the root at capture."""
        return bool(self._facts[0].value)

    def broken(self, *, grad_enabled: bool) -> str:
        """Return which condition does not hold now, in words; empty if all hold."""
        if grad_enabled is not self.grad_enabled:
            return f"grad mode is {'on' if grad_enabled else 'off'}, and was not at capture"
        watched = self._watched or self._watch()
        if not watched.entries.holds() and (changed := self._changed(watched)):
            return changed
        hooked = watched.hooked
        if any(watched.unhooked) or (hooked and any(tuple(table.items()) != ids for table, ids in hooked)):
            return "hooks of its modules are not those at capture"
        if list(map(type, self._parts)) != self._kinds:
            return "a module is of another class than at capture"
        return self._replaced() or _foreign_mode() or _foreign_hooks() or self.python.broken(self.module)

    def changes(self) -> list[Change]:
        """Return the differences from the capture that may be put back; `broken` then tells of any others."""
        found = self.python.changes()
        if self._original is not None and self._original.training is not self._facts[0].value:
            found.append(changed_entry(self._original.__dict__, "training", self._facts[0].value))
        for fact in (*self._facts, *self._constant_options):
            table = fact.held_in()
            if table.get(fact.name) is not fact.value:
                found.append(changed_entry(table, fact.name, Mark.ABSENT if fact.value is None else fact.value))
        tables = [(each.__dict__[name], ids) for each, name, ids in self._hooks] + self._global_hooks
        for hooks, ids in tables:
            if tuple(now := hooks.items()) != ids:
                found.append(Change(partial(_refill, hooks, ids), partial(_refill, hooks, tuple(now))))
        for part, kind in zip(self._parts, self._kinds, strict=True):
            if (other := type(part)) is not kind:
                found.append(Change(partial(_set_class, part, kind), partial(_set_class, part, other)))
        for part, name, flag in self._gradients:
            parameter = part._parameters.get(name)
            if parameter is not None and parameter.requires_grad is not flag:
                set_flag = parameter.requires_grad_
                found.append(Change(partial(set_flag, flag), partial(set_flag, not flag)))
        return found

    def _replaced(self) -> str:
        """Return in words what has replaced something that the graph found at capture."""
        if not all(map(is_, map(getattr, self._callers, self._calling), self._called)):
            changed = next(kind for kind, name, call in self._calls if getattr(kind, name) is not call)
            return f"what calls a {changed.__name__} is not what it was at capture"
        if not (self._tied or self._recurrent or self._entries or self._gradients):  # this is the usual case
            return ""
        for one, other in self._tied:
            if one.tensor is not other.tensor:
                return f"{one.name} and {other.name} were one tensor at capture, and are not"
        if not all(map(_listed, self._recurrent)):
            return "the weights of a recurrent module are not its parameters"
        for entry in self._entries:
            if not entry.holds:
                return f"what was found under {entry.key!r}, on the way to an RRef, is not what it was at capture"
        for each, name, flag in self._gradients:
            parameter = each._parameters.get(name)
            if parameter is None:
                return f"the parameter {type(each).__name__}.{name} is gone"
            if parameter.requires_grad is not flag:
                return f"requires_grad of {type(each).__name__}.{name} is {not flag}, and was {flag} at capture"
        return ""

    def changed_metadata(self, given: Iterable[Any]) -> str:
        """Return which parameter or buffer has other metadata than in the graph, in words; empty if none has.

        Args:
            given: the arguments of the call, none of which may be of a class that sees operations either.
        """
        return "" if self._metadata is None else self._metadata.changed() or foreign_class(given)

    def reordered(self, arguments: Sequence[Any]) -> str:
        """Return why gradients may add up in another order than a rewrite kept; empty if they do not."""
        if self._tied_parameters.broken():
            return "parameters that were one at capture are not, or are one that were not"
        return shared_gradient(_flat(arguments))

    def backward_shows(self, arguments: Sequence[Any], *, returns_several: bool) -> str:
        """Return why the program can tell in which order backward runs; empty if it cannot."""
        return self.backward_order.shows(_flat(arguments), self._tied_parameters, returns_several=returns_several)

    def refuses(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why the original's forward refuses a call that the generated one may take; empty if it does not.

        The generated forward takes by position what is keyword-only in the original, and by name what is
        positional-only.
        """
        if len(args) > self._most:
            return f"{len(args)} positional arguments were given, and the forward takes {self._most}"
        if self._unnamed and not self._unnamed.isdisjoint(kwargs):
            return f"{', '.join(sorted(self._unnamed & kwargs.keys()))} was given by name, and is positional-only"
        return ""

    def misfit(self, parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return which argument differs from its fixed value, or from what the graph assumes; empty if none does."""
        if not (self.python.arguments or self.fixed):
            return ""
        arguments = _bound(parameters, args, kwargs)
        for name, fixed in self.fixed.items():
            value = arguments.get(name)
            if not same(value, fixed):
                return f"the argument {name} is {_brief(value)}, and was fixed to {fixed!r} at capture"
        return self.python.misfit(arguments)

    def _watch(self) -> _Watched:
        facts = [*self._facts, *self._constant_options]
        watched = _Watched(facts=facts)
        for fact in facts:
            held_in = fact.held_in()
            watched.entries.add(held_in, fact.name, fact.value if fact.name in held_in else Mark.ABSENT)
        for each, name, ids in self._hooks:
            table = each.__dict__[name]
            if ids:
                watched.hooked.append((table, ids))
            else:
                watched.unhooked.append(table)
        for table, ids in self._global_hooks:
            (watched.hooked.append((table, ids)) if ids else watched.unhooked.append(table))
        if not any(ids for _, ids in self._global_hooks):
            changed = {id(each) for each, _, ids in self._hooks if ids}
            changed |= {id(each.owner) for each in facts if each.name == "forward" and each.value is not None}
            watched.plain = frozenset(map(id, self._parts[1:])) - changed
        self._watched = watched
        return watched

    def _changed(self, watched: _Watched) -> str:
        for index, fact in enumerate(watched.facts):
            now = watched.entries.now(index)
            if now is fact.value or (now is Mark.ABSENT and fact.value is None):
                continue
            if not same(now, fact.value):
                if fact.name == "training":
                    owner = type(fact.owner).__name__
                    return f"the training flag of {owner} is {now}, and was {fact.value} at capture"
                return f"{fact} is not what it was at capture"
            watched.entries.let_vary(index, same)
        return ""


def _refill(table: Any, items: Sequence[tuple[int, Any]]) -> None:
    table.clear()
    table.update(items)


def _set_class(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


def _foreign_mode() -> str:
    """Return in words which mode of the user's sees every operation: between two of them, it may change the model."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        for each in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
            if not type(each).__module__.startswith(("torch.", "fxlib.")):
                return f"a {type(each).__name__} sees every operation, in the order in which the program makes them"
    return ""


def _foreign_hooks() -> str:
    """Return in words that hooks of the user's see what is saved for backward: they may change the model, too."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and not str(getattr(hooks[0], "__module__", "")).startswith(("torch.", "fxlib.")):
        return "a hook sees every tensor that is saved for backward, in the order in which the program saves them"
    return ""


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, _SCALARS) else f"a {type(value).__name__}"


def _flat(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return arguments, and in place of each container what it holds."""
    if not any(isinstance(each, (tuple, list, dict)) for each in arguments):  # this is nearly always so
        return arguments
    return [leaf for _, leaf in leaves(list(arguments))]


def shared_gradient(arguments: Iterable[Any]) -> str:
    """Return why these arguments' gradients may add up in another order than a rewrite kept; empty if they do not.

    The order is kept for each input by itself; a parameter, or one tensor under two names, has further uses.
    """
    seen: set[int] = set()
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            if isinstance(value, nn.Parameter) or id(value) in seen:
                return "an argument that takes a gradient is a parameter, or is given twice"
            seen.add(id(value))
    return ""


def parameters_of(forward: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a generated forward, without `self`."""
    return tuple(inspect.signature(forward).parameters.values())[1:]


def _taken_by_position(original: nn.Module | None) -> tuple[float, frozenset[str]]:
    """Return how many arguments the original's forward takes by position, and the names of positional-only ones.

    The number is infinite if one of its parameters takes all further arguments, or if nothing is known.
    """
    try:
        parameters = [] if original is None else inspect.signature(original.forward).parameters.values()
    except (TypeError, ValueError):
        return math.inf, frozenset()
    kinds = [each.kind for each in parameters]
    if original is None or Parameter.VAR_POSITIONAL in kinds:
        most: float = math.inf
    else:
        most = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return most, frozenset(each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY)


def _bound(parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters; a wrong call itself raises its error later."""
    found: dict[str, Any] = {}
    for index, each in enumerate(parameters):
        if each.kind is each.VAR_POSITIONAL:
            found[each.name] = tuple(args[index:])
        elif each.kind is each.VAR_KEYWORD:
            known = {other.name for other in parameters}
            found[each.name] = {name: value for name, value in kwargs.items() if name not in known}
        elif index < len(args) and each.kind is not each.KEYWORD_ONLY:
            found[each.name] = args[index]
        else:
            found[each.name] = kwargs.get(each.name, each.default)
    return found


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)


def _tied(parts: Sequence[nn.Module]) -> Iterator[tuple[_Location, _Location]]:
    """Yield pairs of locations that hold one tensor, of which a graph reads one."""
    first: dict[int, _Location] = {}
    for each in parts:
        for table in ("_parameters", "_buffers"):
            for name, value in each.__dict__[table].items():
                location = _Location(each, table, name)
                if value is not None and (before := first.setdefault(id(value), location)) is not location:
                    yield before, location


def _listed(module: nn.RNNBase) -> bool:
    """Return whether the weights with which a recurrent module runs are its parameters."""
    return all(map(is_, module._flat_weights, map(module._parameters.get, module._flat_weights_names)))


def _facts(module: nn.Module) -> Iterator[_Fact]:
    yield _Fact(module, "", "training", module.training)
    yield _Fact(module, "", "forward", module.__dict__.get("forward"))
    for name, child in module._modules.items():
        yield _Fact(module, "_modules", name, child)
    for name, value in deciding(module):
        yield _Fact(module, "", name, value)
    for name in _ALWAYS & module.__dict__.keys():
        yield _Fact(module, "", name, module.__dict__[name])


def _options(module: nn.Module) -> Iterator[_Fact]:
    """Yield the options of a module, if it is one of torch's own."""
    held = vars(module)
    kind: Any = type(module)
    for name in _names_of_options(kind) if kind.__module__.startswith("torch.nn.modules.") else ():
        if name in held and isinstance(held[name], _SCALARS):
            yield _Fact(module, "", name, held[name])


@cache
def _names_of_options(kind: Any) -> Sequence[str]:
    """Return what a class of torch's own modules is made with, and what it says is constant (`__constants__`)."""
    given = (*inspect.signature(kind).parameters, *getattr(kind, "__constants__", ()))
    return [name for name in dict.fromkeys(given) if name not in _ALWAYS]
