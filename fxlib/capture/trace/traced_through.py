"""Modules of torch's own classes that are traced through, since they run more code than their class has.

A module of torch.nn is one node of the graph, identified by its class. If it has hooks or parametrizations
(`torch.nn.utils.parametrize`), its class does not tell what it computes, and no other process could run that node.
Therefore its forward, its hooks and its parametrizations are traced, and the Python state that they read is recorded
like everything else that the forward reads. A module that cannot be traced stays one node, which only this process can
run.
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
"""Key in a node's `meta` for the reason why its module could not be traced through."""
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class TracedThrough:
    """The modules of torch's own classes that one capture traces through: at first all, then those that allow it."""

    def __init__(self) -> None:
        self.whole: dict[nn.Module, str] = {}
        """The modules that stay one node, each with the reason."""
        self._met: dict[nn.Module, None] = {}
        self._failed: nn.Module | None = None
        self.computing = 0
        """Depth of the parametrizations that are computing parameters now; 0 outside of them."""

    def includes(self, module: nn.Module) -> bool:
        """Return whether to trace through a module of one of torch's own classes."""
        return module not in self.whole and (_runs_hooks(module) or _is_parametrized(module))

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Record that the block traces through a module, and whether it succeeds."""
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

        They are the module in which the capture failed and those that run the same code. If the capture failed outside
        of these modules, because of what the forward leaves behind, the modules with hooks are chosen, and the next
        time all others.
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
    """Return whether a module is one that torch puts into a module whose parameters are computed."""
    return type(module).__module__ in ("torch.nn.utils.parametrize", "torch.nn.utils.parametrizations")


def _is_parametrized(module: nn.Module) -> bool:
    return is_part_of_torchs_parametrizations(module) or parametrize.is_parametrized(module)


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for name in _OWN_HOOKS for hook in module.__dict__[name].values()]


def _runs_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, and what all of them read is observed: torch's own hooks may keep anything."""
    hooks = _hooks(module)
    return bool(hooks) and all(map(_is_observed, hooks))


def _is_observed(hook: Callable[..., Any]) -> bool:
    functions = list(functions_in(hook)) or list(functions_in(type(hook).__call__))
    return bool(functions) and all(is_observed(each.__code__) for each in functions)


def _code(module: nn.Module) -> object:
    """Return a key that is equal for modules that run the same code."""
    hooks = tuple(getattr(each, "__code__", type(each)) for each in _hooks(module))
    kind = type(module).__mro__[1] if parametrize.is_parametrized(module) else type(module)
    return kind, hooks, *(type(each) for each in module.modules() if is_part_of_torchs_parametrizations(each))
