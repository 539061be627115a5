"""The arms of `benchmarks.passes`: what each runs in its process, and the process."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self
from unittest import mock

import torch
from torch.fx import GraphModule, symbolic_trace

import fxlib
from benchmarks.transforms.comparisons import COMPARISONS, Comparison, of_model
from benchmarks.transforms.graphs import Chain, StockChain
from fxlib.passes.infra.edit import working_copy
from fxlib.recipes import recipes

SCHEDULE: Final = "schedule"
"""The comparison of the whole recipe against tracing."""
_KEEPS_S: Final = 600.0
"""How long to wait for our own arm, and for programs to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one run of a pass took, and how much it changed."""

    name: str
    seconds: float
    changes: int


Run = Callable[[], list[Taken]]
_COPY: Final = "copy"
_RUN: Final = "run"


class OverCapError(Exception):
    """A run was not over when its time was."""


class Process:
    """One arm in a process of its own, which does nothing while others are timed. One that takes too long is ended.

    Args:
        arm: "fxlib" or "stock".
    """

    def __init__(self, arm: str) -> None:
        self._arm = arm
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()

    def make(self, comparison: str, size: int) -> None:
        """Begin to make the program of a comparison: a pass, or "reinplace" and a model after a slash."""
        self._connection.send((comparison, size))

    def copy(self) -> None:
        """Begin to make a copy of the program for the next run."""
        self._connection.send(_COPY)

    def ready(self) -> int:
        """Wait until it is done, and return the nodes of the program."""
        return int(self._answer(_KEEPS_S))

    def run(self, *, cap_s: float = _KEEPS_S) -> list[Taken]:
        """Transform the copy.

        Raises:
            OverCapError: it took longer; the arm has to make the program again.
        """
        self._connection.send(_RUN)
        found: list[Taken] = self._answer(cap_s)
        return found

    def _answer(self, cap_s: float) -> Any:
        if not self._connection.poll(cap_s):
            self._process.kill()
            self._process.join()
            self._start()
            self.make("", 0)
            self.ready()  # it does not load its modules while the other arm is timed
            raise OverCapError
        return self._connection.recv()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._arm), daemon=True)
        self._process.start()
        theirs.close()


def _serve(connection: Connection, arm: str) -> None:
    torch.set_num_threads(1)
    copied: Callable[[], Run] = _nothing
    run, nodes = _nothing(), 0
    with torch.no_grad():
        while True:
            try:
                asked = connection.recv()
            except EOFError:
                return
            if asked == _RUN:
                connection.send(run())
                run = _nothing()  # lets go of what it made
                continue
            if asked == _COPY:
                run = copied()
            else:
                copied, run, nodes = _nothing, _nothing(), 0  # lets go of the program before
                copied, nodes = _prepared(arm, *asked)
            connection.send(nodes)


def _nothing() -> Run:
    return list


def _prepared(arm: str, comparison: str, size: int) -> tuple[Callable[[], Run], int]:
    if not comparison:
        return _nothing, 0
    if comparison == SCHEDULE:
        whole, nodes = _schedule(size) if arm == "fxlib" else _trace(size)
        return (lambda: whole), nodes
    name, _, model = comparison.partition("/")
    chosen = of_model(model) if model else COMPARISONS[name]
    module, inputs = chosen.make(size)
    nodes = len(module.graph.nodes)
    if arm == "fxlib":
        return (lambda: _ours(chosen, module)), nodes
    before = chosen.left(module)
    return (lambda: _stock(chosen, chosen.stock(module, inputs), before)), nodes


def _schedule(size: int) -> tuple[Run, int]:
    with torch.enable_grad():
        module = fxlib.capture(Chain(size))

    def run() -> list[Taken]:
        gc.collect()
        start = time.perf_counter()
        reports = recipes.apply(module, SCHEDULE).passes
        whole_s = time.perf_counter() - start
        taken = [Taken(name=each.name, seconds=each.seconds, changes=each.changes) for each in reports]
        return [Taken(name=SCHEDULE, seconds=whole_s, changes=sum(each.changes for each in taken)), *taken]

    return run, len(module.graph.nodes)


def _trace(size: int) -> tuple[Run, int]:
    model = StockChain(size)

    def run() -> list[Taken]:
        gc.collect()
        start = time.perf_counter()
        nodes = len(symbolic_trace(model).graph.nodes)
        return [Taken(name=SCHEDULE, seconds=time.perf_counter() - start, changes=nodes)]

    return run, size


def _ours(comparison: Comparison, module: GraphModule) -> Run:
    draft, before = working_copy(module), comparison.left(module)

    def run() -> list[Taken]:
        with _collector_resting():
            done = comparison.ours(draft)
        changes = before - comparison.left(done.result.module)
        return [Taken(name=comparison.ours.name, seconds=done.report.seconds, changes=changes)]

    return run


def _stock(comparison: Comparison, transform: Callable[[], GraphModule], before: int) -> Run:
    def run() -> list[Taken]:
        with _collector_resting(), mock.patch.object(GraphModule, "recompile"):
            start = time.perf_counter()
            made = transform()
            seconds = time.perf_counter() - start
        return [Taken(name=comparison.ours.name, seconds=seconds, changes=before - comparison.left(made))]

    return run


@contextmanager
def _collector_resting() -> Iterator[None]:
    """Have Python's cycle collector do its work before, and not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
