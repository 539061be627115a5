"""Finds the parts of a candidate that a backend makes faster, by timing each compiled and uncompiled on its inputs."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule

from fxlib import wire
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule
from fxlib.runtime.lowering import Part
from fxlib.spec.report import CompiledPart
from fxlib.utils.text import seconds

Forward = Callable[..., Any]

_ROUNDS: Final = 9
_MOST_S: Final = 3.0
"""Seconds after which no further round of a part begins, except for the third."""
_LEAST_ROUNDS: Final = 3


def time_parts(module: GraphModule, step: Callable[[], object], *, limit_s: float) -> list[CompiledPart]:
    """Run one step, in which the parts are compiled, and another one, in which each part is timed.

    A part that could not be compiled in time, or is no faster compiled, is reported as staying uncompiled.

    Raises:
        TimeoutError: the first step exceeded its time limit outside of a compiler.
    """
    if isinstance(module, CapturedModule):
        module._fxlib.lowered.of(module)
    parts = _parts_of(module)
    for part in parts:
        part.limit_s = math.inf  # it is interrupted here, so that no compiler keeps running while others are measured
    with _interrupted_after(limit_s, module):
        step()
    taken: dict[Part, tuple[float, float]] = {}
    for part in parts:
        part.watch = partial(_time, taken, part)
    step()
    return [_report(part, taken.get(part)) for part in parts]


@contextmanager
def _interrupted_after(limit_s: float, module: GraphModule) -> Iterator[None]:
    """Raise in a compiler that runs for longer, and leave all parts uncompiled that are not done by then.

    A compiler that does not return to Python is left to the trial's own limits.
    """

    def interrupt(_: int, __: object) -> None:
        why = f"compiling took more than {limit_s:.3g} s"
        for part in _parts_of(module):
            part.leave(why)
        raise TimeoutError(why)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def leave_parts(module: GraphModule, first: Collection[str]) -> None:
    """Run parts uncompiled, given the names of their first nodes."""
    for part in _parts_of(module):
        if part.first in first:
            part.leave()


def _parts_of(module: GraphModule) -> Sequence[Part]:
    return module._fxlib.lowered.parts if isinstance(module, CapturedModule) else ()


def without_parts(graph: bytes, parts: Sequence[CompiledPart]) -> bytes:
    """Return a serialized graph in which no backend computes these parts."""
    message = wire.parse(graph)
    nodes = message.modules[-1].graph.nodes
    positions = {node.name: position for position, node in enumerate(nodes)}
    for part in parts:
        position = positions.get(part.first, len(nodes))
        for node in nodes[position : position + part.nodes]:
            node.ClearField("backend")
    return wire.serialize(message)


def _report(part: Part, taken_s: tuple[float, float] | None) -> CompiledPart:
    report = CompiledPart(first=part.first, nodes=part.nodes, backend=part.name, compile_s=part.compile_s)
    if taken_s is None:
        why = part.problem or "the step does not call it in a way that its backend compiles"
        return replace(report, compiled=False, why=Reason.PART_NOT_COMPILED.sentence(why))
    plain_s, compiled_s = taken_s
    report = replace(report, plain_s=plain_s, compiled_s=compiled_s)
    if compiled_s < plain_s:
        return report
    detail = f"{seconds(compiled_s)}, and {seconds(plain_s)} as it is"
    return replace(report, compiled=False, why=Reason.PART_NOT_FASTER.sentence(detail))


def _time(
    taken: dict[Part, tuple[float, float]], part: Part, compiled: Forward, module: nn.Module, values: tuple[Any, ...]
) -> None:
    """Time rounds of both in random order, and record the medians. No backward goes beyond the part.

    A part may use a weight that is also used before it, and be called with values computed from that weight.
    """
    values = tuple(_cut_off(each) for each in values)
    arms: list[tuple[Forward, list[float]]] = [(module.forward, []), (compiled, [])]
    end = time.perf_counter() + _MOST_S
    for done in range(_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for run, samples in random.sample(arms, len(arms)):
            samples.append(_seconds(run, module, values))
    (_, plain_s), (_, compiled_s) = arms
    taken[part] = median(plain_s), median(compiled_s)


def _cut_off(value: Any) -> Any:
    """Return a tensor detached from its computation."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _seconds(run: Forward, module: nn.Module, values: tuple[Any, ...]) -> float:
    """Return the seconds of a forward, and of a backward if gradients are recorded, without accumulating gradients."""
    start = time.perf_counter()
    results = [each for each in run(*values) if each.requires_grad]
    if results:
        given = [each for each in values if isinstance(each, torch.Tensor)]
        wanted = [each for each in (*given, *module.parameters()) if each.requires_grad]
        torch.autograd.grad(results, wanted, [torch.ones_like(each) for each in results], allow_unused=True)
    return time.perf_counter() - start
