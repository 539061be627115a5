"""Modules of torch's own classes that are traced through, since they run more than their class holds.

A module of torch.nn is one node of the graph, by its class. With hooks, or with parametrizations
(`torch.nn.utils.parametrize`), its class does not tell what it computes, and no other process could run that node: so
its forward, its hooks and its parametrizations are traced, and what they read of Python's state is noted like anything
else that the forward reads. A module that cannot be traced stays one node, which only this process can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from fxlib.capture.recording.observers import functions_in, is_observed
from fxlib.errors import CaptureError

WHOLE = "whole"
"""Key of a node's `meta`: why its module could not be traced through."""
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class TracedThrough:
    """The modules of torch's own classes that one capture traces through: at first all, then those that can be."""

    def __init__(self) -> None:
        self.whole: dict[nn.Module, str] = {}
        """The modules that stay one node, and why."""
        self._met: dict[nn.Module, None] = {}
        self._failed: nn.Module | None = None
        self.computing = 0
        """Above zero while parameters are computed by their parametrizations."""

    def includes(self, module: nn.Module) -> bool:
        """Return whether to trace through a module of torch's own."""
        return module not in self.whole and (_runs_hooks(module) or _is_parametrized(module))

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Note that the block traces through a module, and whether it gets through."""
        self._met[module] = None
        computes = isinstance(module, parametrize.ParametrizationList)
        self.computing += computes
        try:
            yield
        except Exception:
            self._failed = self._failed or module
            raise
        finally:
            self.computing -= computes

    def keep_whole(self, error: CaptureError) -> bool:
        """Choose modules that stay one node when a failed capture is tried again; return whether there are any.

        They are the module in which the capture failed and those that run the same code. Where it failed outside of
        them, because of what the forward leaves behind, they are those with hooks, and the next time all others.
        """
        failed, met = self._failed, [each for each in self._met if each not in self.whole]
        self._failed, self._met = None, {}
        if failed is not None:
            found = [each for each in met if _code(each) == _code(failed)]
        else:
            found = [each for each in met if _runs_hooks(each)] or met
        self.whole.update(dict.fromkeys(found, str(error)))
        return bool(found)


def is_part_of_torchs_parametrizations(module: nn.Module) -> bool:
    """Return whether a module is one of those that torch puts into a module whose parameters are computed."""
    return type(module).__module__ in ("torch.nn.utils.parametrize", "torch.nn.utils.parametrizations")


def _is_parametrized(module: nn.Module) -> bool:
    return is_part_of_torchs_parametrizations(module) or parametrize.is_parametrized(module)


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for name in _OWN_HOOKS for hook in module.__dict__[name].values()]


def _runs_hooks(module: nn.Module) -> bool:
    """Return whether it has hooks whose reading of Python's state is observed, all of them: torch's own may keep anything."""
    hooks = _hooks(module)
    return bool(hooks) and all(map(_is_observed, hooks))


def _is_observed(hook: Callable[..., Any]) -> bool:
    functions = list(functions_in(hook)) or list(functions_in(type(hook).__call__))
    return bool(functions) and all(is_observed(each.__code__) for each in functions)


def _code(module: nn.Module) -> object:
    """Return what decides which code runs in a module."""
    hooks = tuple(getattr(each, "__code__", type(each)) for each in _hooks(module))
    kind = type(module).__mro__[1] if parametrize.is_parametrized(module) else type(module)
    return kind, hooks, *(type(each) for each in module.modules() if is_part_of_torchs_parametrizations(each))
