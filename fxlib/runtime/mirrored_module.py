"""A module whose attributes, parts and training flag are those of another one, the model that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.module_state import Mirror, ModuleState
from fxlib.runtime.program_modes import training_modes
from fxlib.runtime.submodules import TABLES

_OF_CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__")
"""Methods that Python looks up on the class, by which `nn.Sequential` and other containers give their parts."""
_OF_MODULES = ("load_state_dict", "parameters", "state_dict", "to", "zero_grad")
"""Methods that every module has, and a model may have in a form of its own."""


class MirroredModule(GraphModule):
    """A graph module that passes on what is set, deleted or switched on it to its original, which may do so, too."""

    _fxlib: ModuleState

    def _be_like_original(self) -> None:
        """Have this module's class, which no other module has, what the class of its original has of its own."""
        if (original := self._fxlib.original) is None:
            return
        kind: Any = type(self)
        for name in (*_OF_CONTAINERS, *_OF_MODULES):
            if getattr(type(original), name, None) is not getattr(nn.Module, name, None):
                setattr(kind, name, _handed_on(name))
        kind._version = original._version  # checkpoints have it, by which older ones are told

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        mirror = self._mirror()
        if mirror is None:
            super().__setattr__(name, value)
            return
        self._follow()
        state, original = self._fxlib, mirror.original
        is_originals = _is_part(original, name)
        known = name in self.__dict__ or isinstance(getattr(type(self), name, None), property)
        is_new = not (is_originals or _is_part(self, name) or hasattr(type(self), name))
        if not known and (is_new or name in original.__dict__):
            if is_new and not hasattr(type(original), name):
                super().__setattr__(name, value)
            if not _is_method_of(self, value):  # the module's own methods are no part of the original
                mirror.replace(name, _bound_to(original, value, self))
            self._follow()  # a setter may have replaced something else
            return
        if isinstance(value, (nn.Parameter, nn.Module)):
            original.__dict__.pop(name, None)  # it takes the place of a plain attribute, and answers for none
        super().__setattr__(name, value)
        if name in state.constants or name == "training" or is_originals or name in mirror.shared:
            mirror.replace(name, value)
            self._follow()

    @override
    def __delattr__(self, name: str) -> None:
        mirror = self._mirror()
        if mirror is None:
            super().__delattr__(name)
            return
        self._follow()
        is_own = name in self.__dict__ or _is_part(self, name)
        if is_own:
            super().__delattr__(name)
        if not is_own or name in mirror.original.__dict__ or _is_part(mirror.original, name):
            mirror.delete(name)
            self._follow()

    @override
    def delete_submodule(self, target: str) -> bool:
        """Delete a submodule, if it is there; a module right below the root stays the original's."""
        if "." in target or target not in self._modules:
            return super().delete_submodule(target)
        self._follow()
        del self._modules[target]
        self.keep_own_parts()
        return True

    def keep_own_parts(self) -> None:
        """Declare that what this module has in its tables now, but its original has not, is this module's alone."""
        if (mirror := self._mirror()) is not None:
            mirror.note_own(self)

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the training flags as the original's own `train` does."""
        self._check_switched(mode=mode)
        return self._switched("train", mode)

    @override
    def eval(self) -> Self:
        """Set the training flags as the original's own `eval` does."""
        self._check_switched(mode=False)
        return self._switched("eval")

    def _check_switched(self, *, mode: bool) -> None:
        """Refuse a training flag with which an exported program that has no original does not compute."""
        exported = self._fxlib.original is None and isinstance(self.graph._codegen, GuardedCodeGen)
        if exported and not training_modes(self.graph) <= {mode}:
            raise FxlibError(
                f"the program was exported in {'evaluation' if mode else 'training'} mode, which is part of its graph",
                where=type(self).__name__,
                hint=f"Export it again after model.{'train' if mode else 'eval'}().",
            )

    def _switched(self, name: str, *mode: bool) -> Self:
        original = self._fxlib.original
        if original is None or getattr(getattr(original, name), "__func__", None) is getattr(nn.Module, name):
            getattr(super(), name)(*mode)
            return self
        getattr(original, name)(*mode)
        self.training = original.training
        for part in self.children():
            if all(part is not each for each in original.children()):
                part.train(original.training)
        return self

    @override
    def _replicate_for_data_parallel(self) -> Any:
        replicated: Any = super() if self._fxlib.original is None else self._fxlib.original
        return replicated._replicate_for_data_parallel()  # its parts have the same names

    def _follow(self) -> None:
        state = self._fxlib
        if state.mirror is not None:
            state.mirror.follow(self, state.constants, is_linked=state.conditions.module is self)

    def _catch_up(self) -> None:
        """Follow the original before the parts of the root are read; dynamo reads them as it finds them."""
        if torch.compiler.is_dynamo_compiling() or (mirror := self._mirror()) is None:
            return
        if not mirror.loans:
            mirror.follow(self, self._fxlib.constants, is_linked=True)

    def _is_followed(self, table: str, name: str) -> bool:
        """Return whether a part of the root is the original's, too, or whether there is no original to ask."""
        state = self.__dict__.get("_fxlib")
        if state is None or state.mirror is None:
            return True
        theirs = state.mirror.original.__dict__.get(table, {})
        return theirs.get(name, theirs) is self.__dict__[table][name]

    @override
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules right below the root, as they are on the original now."""
        self._catch_up()
        yield from super().named_children()

    @override
    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._catch_up()
        yield from super()._named_members(*args, **kwargs)

    def _mirror(self) -> Mirror | None:
        """Return the link to the original; None if there is no original, or either of the two is not complete.

        A copy on which a pass works has the state of the module from which it was made, and no link of its own.
        """
        state = self.__dict__.get("_fxlib")
        if state is None or state.mirror is None or state.conditions.module is not self:
            return None
        found: Mirror = state.mirror
        return found if _has_tables(found.original) else None


def _handed_on(name: str) -> Callable[..., Any]:
    """Return a method that is the original's."""

    def method(self: MirroredModule, *args: Any, **kwargs: Any) -> Any:
        state = self._fxlib
        if name == "state_dict" and state.ahead is not None:
            state.ahead.settle_pushes()
        self._follow()
        try:
            found = getattr(state.original, name)(*args, **kwargs)
            return self if found is state.original else found
        finally:
            self._follow()

    method.__name__ = name
    return method


def _is_method_of(module: nn.Module, value: object) -> bool:
    """Return whether a value is bound to a module, and is no function that the program has bound to it itself."""
    if isinstance(value, MethodType):
        function = value.__func__
        return value.__self__ is module and function is getattr(type(module), getattr(function, "__name__", ""), None)
    return getattr(value, "__self__", None) is module


def _bound_to(original: nn.Module, value: object, module: nn.Module) -> object:
    """Return a value, bound to the original if it is bound to the module."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, original)
    return value


def _has_tables(module: nn.Module) -> bool:
    """Return whether a module is complete, and no copy under way."""
    return "_modules" in module.__dict__


def _is_part(module: nn.Module, name: str) -> bool:
    """Return whether a module has a parameter, buffer or module of this name."""
    return any(name in module.__dict__[table] for table in TABLES)
