"""Which operators of torch may travel: what became of each when it was called out of bounds.

Arms: `tried` (stayed inside of its tensors), `ruled` (under a rule for its arguments), `refused`; metric `operators`,
overloads of torch.ops and functions and methods of torch counted each. The `calls` of the arm `table` were made to tell
them apart. Those that may travel are then called `again`, with fewer calls of each: `signals` are calls that ended
their process or wrote beside their tensors. Quick runs leave that out.
Case `{models}`: the `operators` of the graphs of all models of the tests' zoo that are of this family, or of all
modules of `torch.nn`, as torch.export makes the graphs and as decomposed to core ATen, each operator counted once; and
the `share` of them that may travel. Quick runs have the lightest models alone.
`python -m benchmarks.out_of_bounds` makes the table anew.
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
from torch._ops import OpOverload

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
    for name, found in graphs(quick):
        share = sum(operator_name(each) is not None for each in found) / len(found)
        rows += [
            row(benchmark="memory_safety", case={"models": name}, arm="graphs", metric=metric, unit="", samples=[value])
            for metric, value in (("operators", float(len(found))), ("share", share))
        ]
    return rows


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


def graphs(quick: bool) -> Iterator[tuple[str, frozenset[OpOverload]]]:
    """Yield the operators of the zoo's models, family by family, and those of the modules of torch.nn."""
    for family in ("convolutional", "transformer"):
        names = zoo.models(family=family, heavy=not quick)
        yield family, frozenset().union(*(operators(*zoo.build(name, small=True)) for name in names))
    if not quick:
        of_modules = [operators(make(), inputs) for name, (make, inputs) in CASES.items() if name not in _NOT_EXPORTED]
        yield "torch.nn", frozenset().union(*of_modules)


def operators(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> frozenset[OpOverload]:
    """Return the operators of a model's graph, as exported and as decomposed where torch can."""
    for each in model.modules():
        if (config := getattr(each, "config", None)) is not None:
            config.use_cache = False  # a cache is no output that torch.export knows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, inputs, strict=False)
        found = [exported.graph]
        with contextlib.suppress(Exception):  # CrossMapLRN2d cannot be decomposed
            found.append(exported.run_decompositions().graph)
    return frozenset(node.target for graph in found for node in graph.nodes if isinstance(node.target, OpOverload))


if __name__ == "__main__":
    main("memory_safety", measure, about="Operators that stay inside of their tensors, and models made of them.")
