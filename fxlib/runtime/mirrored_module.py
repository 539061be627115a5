"""A module whose attributes, parts and training flag are those of another one, the model that it stands for."""

from __future__ import annotations

from typing import Any, Self

from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

from fxlib.runtime.module_state import Mirror, ModuleState
from fxlib.runtime.submodules import TABLES


class MirroredModule(GraphModule):
    """A graph module that passes on what is set, deleted or switched on it to its original, which may do so, too."""

    _fxlib: ModuleState

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
            if getattr(value, "__self__", None) is not self:  # a method of this module is no part of the original
                mirror.replace(name, value)
            self._follow()  # a setter may have replaced something else
            return
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
        del self._modules[target]
        return True

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the training flags as the original's own `train` does."""
        return self._switched("train", mode)

    @override
    def eval(self) -> Self:
        """Set the training flags as the original's own `eval` does."""
        return self._switched("eval")

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
            state.mirror.follow(self, state.constants)

    def _mirror(self) -> Mirror | None:
        """Return the link to the original; None if there is no original, or either of the two is not complete.

        A copy on which a pass works has the state of the module from which it was made, and no link of its own.
        """
        state = self.__dict__.get("_fxlib")
        if state is None or state.mirror is None or state.conditions.module is not self:
            return None
        found: Mirror = state.mirror
        return found if _has_tables(found.original) else None


def _has_tables(module: nn.Module) -> bool:
    """Return whether a module is complete, and no copy under way."""
    return "_modules" in module.__dict__


def _is_part(module: nn.Module, name: str) -> bool:
    """Return whether a module has a parameter, buffer or module of this name."""
    return any(name in module.__dict__[table] for table in TABLES)
