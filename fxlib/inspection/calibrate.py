"""Measures the processor at hand: what the simulator needs to know of it, with as many threads as torch uses now.

Cases of all kinds of work take turns, short ones among short ones and long ones among long ones, so that each finds the
processor's caches as it would in a program; results go to fresh memory. Of each the least time counts: whatever else
runs on the machine only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxlib.inspection.cases import NODES, Work, cases, copies, graphs
from fxlib.inspection.device import Bandwidth, Device, Peak
from fxlib.inspection.fitting import fit
from fxlib.inspection.operations import Operation, Operations
from fxlib.inspection.tensors import number
from fxlib.inspection.work import WORK
from fxlib.utils.hardware import memory_bytes, processor

_DTYPES = (torch.float32, torch.bfloat16)
_FEWEST_ROUNDS = 3
_FEWEST_CASES = 3
"""Of one operator, to describe it by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One case: the operator that it is a case of, how many it runs in all, and its time."""

    operation: Operation
    operators: int
    seconds: float


@torch.no_grad()
def calibrate(*, seconds: float = 8.0) -> Device:
    """Return a description of this processor.

    Args:
        seconds: how long to measure; at least three rounds of all cases are run.
    """
    calls, moves = graphs(), copies()
    kinds = [run for dtype in _DTYPES for run in cases(dtype)]
    called_s = _least(list(calls.values()), seconds / 10)
    node_s = {kind: each / NODES for kind, each in zip(calls, called_s, strict=True)}
    taken_s = _least([*moves.values(), *kinds], seconds)
    moved_s = dict(zip(moves, taken_s, strict=False))
    samples = [_sample(run, each) for run, each in zip(kinds, taken_s[len(moves) :], strict=True)]
    peaks = tuple(_peaks(samples, node_s["view"]))
    copy_s = next(each.launch_s for each in peaks if each.work == "elementwise") + node_s["view"]
    return Device(
        name=f"{processor()}, {torch.get_num_threads()} threads",
        source=f"measured by fxlib calibrate, torch {torch.__version__}",
        memory_bytes=float(memory_bytes()),
        layer_s=max(node_s["layer"] - node_s["function"], 0.0),
        overload_s=max(node_s["overload"] - node_s["function"], 0.0),
        attribute_s=max(node_s["attribute"] - node_s["function"], 0.0),
        dispatch_s=node_s["view"],
        asynchronous=False,
        memory=tuple(_bandwidths(moved_s, copy_s)),
        peaks=peaks,
    )


def _least(runs: Sequence[Work], seconds: float) -> list[float]:
    """Return the least time of each, of rounds in which they take turns, from the shortest to the longest."""
    least_s = [min(_timed(run), _timed(run)) for run in runs]
    order, rounds, end = sorted(range(len(runs)), key=least_s.__getitem__), 0, time.perf_counter() + seconds
    while rounds < _FEWEST_ROUNDS or time.perf_counter() < end:
        for place in order:
            least_s[place] = min(least_s[place], _timed(runs[place]))
        rounds += 1
    return least_s


def _timed(run: Work) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _sample(run: Work, seconds: float) -> _Sample:
    with Operations() as found:
        run()
    operations = found.taken()
    most = max(operations, key=lambda each: (not each.is_view, each.flops, each.elements))
    return _Sample(operation=most, operators=len(operations), seconds=seconds)


def _peaks(samples: Sequence[_Sample], dispatch_s: float) -> Iterator[Peak]:
    """Fit each kind; and of those without arithmetic, in which operators differ most, each operator by itself."""
    groups: dict[tuple[str, str], list[_Sample]] = {}
    for each in samples:
        dtype = each.operation.dtype if each.operation.dtype in _DTYPES else torch.float32
        name = str(dtype).removeprefix("torch.")
        groups.setdefault((name, each.operation.work), []).append(each)
        if not each.operation.flops:
            groups.setdefault((name, each.operation.operator), []).append(each)
    for (dtype_name, work), of_kind in groups.items():
        if work in WORK or len(of_kind) >= _FEWEST_CASES:
            yield _peak(dtype_name, work, of_kind, dispatch_s)


def _peak(dtype: str, work: str, samples: Sequence[_Sample], dispatch_s: float) -> Peak:
    amounts = [(1, number(each.operation.flops) or 0, number(each.operation.elements) or 0) for each in samples]
    taken_s = [max(each.seconds - each.operators * dispatch_s, dispatch_s / 10) for each in samples]
    launch_s, flop_s, element_s = fit(amounts, taken_s)
    return Peak(dtype=dtype, work=work, flops_per_s=_rate(flop_s), elements_per_s=_rate(element_s), launch_s=launch_s)


def _rate(cost_s: float) -> float:
    return 1 / cost_s if cost_s else float("inf")


def _bandwidths(moved_s: Mapping[int, float], start_s: float) -> list[Bandwidth]:
    return [
        Bandwidth(bytes=float(moved), bytes_per_s=moved / max(taken_s - start_s, start_s / 10))
        for moved, taken_s in moved_s.items()
    ]
