"""Which operators of torch may travel: what became of each when it was called out of bounds.

Arms: `tried` (stayed inside of its tensors), `ruled` (under a rule for its arguments), `refused`; metric `operators`,
overloads of torch.ops and functions and methods of torch counted each. `calls` were made for it.
Case `{model}`: the share of the operators of its graph, as torch.export makes it and as decomposed to core ATen, that
may travel. `python -m benchmarks.out_of_bounds` tries them anew.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch

from benchmarks.report import Row, main, row
from fxlib.wire import memory_safety
from fxlib.wire.targets import operator_name
from tests.models import zoo
from tests.wire.zoo import CASES

_NOT_EXPORTED = frozenset({"AdaptiveLogSoftmaxWithLoss", "CTCLoss", "GaussianNLLLoss"})
"""Modules that ask for values: torch.export gives up on them."""


def measure(quick: bool) -> Sequence[Row]:
    """Count the table, and the operators of models in it."""
    table = memory_safety.table()
    counts = {kind: len(table[kind]) for kind in ("tried", "ruled", "refused")} | {"calls": table["calls"]}
    rows = [
        row(benchmark="memory_safety", case={}, arm=arm, metric="operators", unit="", samples=[float(count)])
        for arm, count in counts.items()
    ]
    shares = {name: share(model, inputs) for name, model, inputs in models(quick)}
    return rows + [
        row(benchmark="memory_safety", case={"model": name}, arm="travels", metric="share", unit="", samples=[found])
        for name, found in shares.items()
    ]


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
