"""The graphs of one module, each for different calls: choose the one that a call runs, and count how often each ran.

A captured module is one graph under the `Conditions` of its capture. Training and evaluation, or calls with and without
a mask, are different programs: each has a captured module of its own over the same state, and the main module runs
the one that fits the call. If none fits, the original runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from fxlib.errors import WorkloadError
from fxlib.spec.report import Usage
from fxlib.spec.workload import MAIN, MAX_VARIANTS

_LOG = logging.getLogger(__name__)

MAX_GRAPHS = 1 + MAX_VARIANTS
"""The largest number of graphs of one module, with the main one; a call that does not fit the last one tries all."""

_MAX_REASONS = 32
"""The largest number of reasons that are counted separately; some of them name sizes, of which there is no end."""

OTHER_REASONS = "other reasons"


class GuardFailure(NamedTuple):
    """The reason why a graph may not run for a call, and whether the user is warned when the original runs instead."""

    reason: str
    warns: bool = False


class Captured(Protocol):
    """The part of captured modules that this file uses; the modules themselves are built on this file."""

    @property
    def _fxlib(self) -> Any: ...

    def _guard_failure(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> GuardFailure | None: ...

    def _guard_failure_as_variant(
        self, main: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> GuardFailure | None: ...


M = TypeVar("M", bound=Captured)


@dataclass(slots=True)
class _Variant(Generic[M]):
    """One further graph, and how often it ran."""

    name: str
    module: M
    runs: int = 0


class GraphSet(Generic[M]):
    """The graphs of one captured module besides its own, in the order in which they were added."""

    def __init__(self) -> None:
        self._variants: list[_Variant[M]] = []
        self._last: _Variant[M] | None = None
        """The variant that ran last; None if the main graph did."""
        self._main_runs = 0
        self._original_runs: dict[str, int] = {}
        self._stand_in: tuple[M, str] | None = None
        """The module whose graph runs in place of the main one, and why; None if the main one runs. It is not copied
        with the module."""
        self.unmet: Callable[[M, tuple[Any, ...], Mapping[str, Any]], None] | None = None
        """The function that is called with the module and the arguments of a call that no graph fits, before the
        original runs. It is not copied with the module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphSet[M]:
        copied = GraphSet[M]()
        for each in self._variants:
            copied._variants.append(_Variant(each.name, copy.deepcopy(each.module, memo)))
        return copied

    def __bool__(self) -> bool:
        return bool(self._variants)

    @property
    def alone(self) -> bool:
        """Whether the main graph is the only one, and nobody asks about calls that it does not fit."""
        return not self._variants and self._stand_in is None and self.unmet is None

    @property
    def why_replaced(self) -> str | None:
        """Why another graph runs in place of the main one; None if the main one runs."""
        return None if self._stand_in is None else self._stand_in[1]

    def __iter__(self) -> Iterator[tuple[str, M]]:
        return ((each.name, each.module) for each in self._variants)

    def add(self, main: M, name: str, module: M) -> str:
        """Have `main` run another graph of the same original wherever that fits; return the name of a dropped variant.

        A variant of the same name is replaced. If there are `MAX_GRAPHS` graphs, the least used variant is dropped.

        Raises:
            WorkloadError: the name is that of the main graph, or the graph is of another model.
        """
        if name == MAIN:
            raise WorkloadError(f"{MAIN!r} is the module's own graph", where="variant", hint="Choose another name.")
        if module._fxlib.original is not main._fxlib.original or main._fxlib.original is None:
            raise WorkloadError("it is a graph of another model", where=f"variant {name!r}")
        module._fxlib.tape = main._fxlib.tape  # one call pushes the gradients of whichever graphs ran, in order
        variants = [each for each in self._variants if each.name != name]
        dropped = ""
        if len(variants) >= MAX_GRAPHS - 1:
            least = min(variants, key=lambda each: each.runs)
            variants.remove(least)
            dropped = least.name
        self._last = None
        self._variants = [*variants, _Variant(name, module)]  # a new list: another thread may be walking the old one
        return dropped

    def usage(self) -> Usage:
        """Return how often each graph and the original ran."""
        graphs = {MAIN: self._main_runs} | {each.name: each.runs for each in self._variants}
        return Usage(graphs=graphs, original=dict(self._original_runs))

    def fitting(
        self, main: M, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> M | GuardFailure:
        """Return the module whose graph fits a call, preferably the one that ran last; or the reason why none fits."""
        last = self._last
        if last is not None and not last.module._guard_failure_as_variant(
            main, args, kwargs, grad_enabled=grad_enabled
        ):
            _count(last)
            return last.module
        failure, runs = self._failure_of_main(main, args, kwargs, grad_enabled=grad_enabled)
        if failure is None:
            self._last = None
            if self._stand_in is not None:
                self._count_original(self._stand_in[1])
            else:
                self._main_runs += not torch.compiler.is_dynamo_compiling()  # a count would be a guard, broken at once
            return runs
        for each in self._variants:
            if each is last:
                continue
            found = each.module._guard_failure_as_variant(main, args, kwargs, grad_enabled=grad_enabled)
            if found is None:
                self._last = each
                _count(each)
                return each.module
            if found.warns and not failure.warns:  # it fits but for this, which the user can change
                failure = found
        return failure

    def fits(self, main: M, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool) -> M | None:
        """Return the module whose graph would run for a call, as `fitting` chooses it; nothing is counted."""
        last = self._last
        if last is not None and not last.module._guard_failure_as_variant(
            main, args, kwargs, grad_enabled=grad_enabled
        ):
            return last.module
        failure, runs = self._failure_of_main(main, args, kwargs, grad_enabled=grad_enabled)
        if failure is None:
            return runs
        for each in self._variants:
            if each.module._guard_failure_as_variant(main, args, kwargs, grad_enabled=grad_enabled) is None:
                return each.module
        return None

    def original_runs(self, main: M, why: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count a call that no graph fits, and report it to `unmet`."""
        if torch.compiler.is_dynamo_compiling():
            return
        if self._count_original(why) == 1:
            _LOG.info("the original of %s runs: %s", type(main).__name__, why)
        if self.unmet is not None:
            self.unmet(main, args, kwargs)

    def replace_main(self, main: M, original: M | None, why: str = "") -> None:
        """Run the graph of `original` in place of the main one from now on, or the main one again (None).

        Calls that were made ahead for the module are waited for and forgotten first. Gradients that are still to be
        pushed are pushed by one call, whichever graph they come from.

        Raises:
            WorkloadError: it is a graph of another model.
        """
        state = main._fxlib
        if original is not None and original._fxlib.original is not state.original:
            raise WorkloadError("it is a graph of another model", where="the original's graph")
        if state.ahead is not None:
            state.ahead.settle()
        if original is not None:
            original._fxlib.tape = state.tape
        self._last = None
        self._stand_in = None if original is None else (original, why)

    def _failure_of_main(
        self, main: M, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> tuple[GuardFailure | None, M]:
        """Return why the main graph, or the graph in its place, may not run for a call; and that graph's module."""
        if self._stand_in is None:
            return main._guard_failure(args, kwargs, grad_enabled=grad_enabled), main
        original = self._stand_in[0]
        return original._guard_failure_as_variant(main, args, kwargs, grad_enabled=grad_enabled), original

    def _count_original(self, why: str) -> int:
        """Count a call that the original runs, and return how many calls have had that reason so far."""
        if torch.compiler.is_dynamo_compiling():
            return 0
        counts = self._original_runs
        key = why if why in counts or len(counts) < _MAX_REASONS else OTHER_REASONS
        counts[key] = counts.get(key, 0) + 1
        return counts[key]


def usage(module: nn.Module) -> Usage:
    """Return how often each graph of a captured module and its original have run; no counts for any other module."""
    state = module.__dict__.get("_fxlib")
    return Usage() if state is None else state.graphs.usage()


def _count(variant: _Variant[Any]) -> None:
    if not torch.compiler.is_dynamo_compiling():
        variant.runs += 1
