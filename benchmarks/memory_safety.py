"""Which operators of torch may travel: what became of each when it was called out of bounds.

Arms: `tried` (stayed inside of its tensors), `ruled` (under a rule for its arguments), `refused`; metric `operators`,
overloads of torch.ops and functions and methods of torch counted each. The `calls` of the arm `table` were made to tell
them apart. Those that may travel are then called `again`, with fewer calls of each: `signals` are calls that ended
their process or wrote beside their tensors. Quick runs leave that out.
Case `{model}`: the share of the operators of its graph, as torch.export makes it and as decomposed to core ATen, that
may travel. `python -m benchmarks.out_of_bounds` makes the table anew.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.out_of_bounds.__main__ import read
from benchmarks.out_of_bounds.trials import Trial
from benchmarks.report import Row, main, row
from fxlib.wire import memory_safety
from fxlib.wire.targets import operator_name
from tests.models import zoo
from tests.wire.zoo import CASES

_NOT_EXPORTED = frozenset({"AdaptiveLogSoftmaxWithLoss", "CTCLoss", "GaussianNLLLoss"})
"""Modules that ask for values: torch.export gives up on them."""

_CALLS_AGAIN: Final = 40
"""Calls of each operator with something out of bounds, where the table is made of 160."""


def measure(quick: bool) -> Sequence[Row]:
    """Count the table, try again what may travel, and count the operators of models that do."""
    table = memory_safety.table()
    counts = [(kind, "operators", len(table[kind])) for kind in ("tried", "ruled", "refused")]
    counts += [("table", "calls", table["calls"]), *([] if quick else tried_again([*table["tried"], *table["ruled"]]))]
    rows = [
        row(benchmark="memory_safety", case={}, arm=arm, metric=metric, unit="", samples=[float(count)])
        for arm, metric, count in counts
    ]
    shares = {name: share(model, inputs) for name, model, inputs in models(quick)}
    return rows + [
        row(benchmark="memory_safety", case={"model": name}, arm="travels", metric="share", unit="", samples=[found])
        for name, found in shares.items()
    ]


def tried_again(names: Sequence[str]) -> list[tuple[str, str, int]]:
    """Call operators out of bounds once more; return how many were called, how often, and the calls that got out."""
    with tempfile.TemporaryDirectory() as folder:
        named, trials = Path(folder, "names"), Path(folder, "trials")
        named.write_text("\n".join(names))
        command = [sys.executable, "-m", "benchmarks.out_of_bounds", "--count", str(_CALLS_AGAIN)]
        subprocess.run([*command, "--names", named, "--trials", trials], check=True, stdout=subprocess.DEVNULL)
        return again(read(trials))


def again(trials: Sequence[Trial]) -> list[tuple[str, str, int]]:
    """Return what became of operators that were tried again, as arms, metrics and values."""
    found = {
        "operators": len(trials),
        "calls": sum(each.calls for each in trials),
        "signals": sum(len(each.deaths) for each in trials),
    }
    return [("again", metric, count) for metric, count in found.items()]


def models(quick: bool) -> Iterator[tuple[str, torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Yield whole models, and in long runs the modules of torch.nn, too."""
    for name in zoo.models(heavy=False)[: 2 if quick else None]:
        yield name, *zoo.build(name)
    for name, (make, inputs) in () if quick else CASES.items():
        if name not in _NOT_EXPORTED:
            yield f"nn.{name}", make(), inputs


def share(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the share of a graph's operators that may travel, each counted once, as decomposed where torch can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, inputs, strict=False)
        graphs = [exported.graph]
        with contextlib.suppress(Exception):  # CrossMapLRN2d cannot be decomposed
            graphs.append(exported.run_decompositions().graph)
    found = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return sum(operator_name(each) is not None for each in found) / max(len(found), 1)


if __name__ == "__main__":
    main("memory_safety", measure, about="Operators that stay inside of their tensors, and models made of them.")
