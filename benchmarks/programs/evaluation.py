"""The evaluation of a program's model over a few batches: as written, as rewritten, and under `fxlib.pipeline`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlib
from benchmarks.programs.catalogue import Program
from fxlib.runtime.ops.calls import is_call, is_issue
from fxlib.spec.workload import Batch, Workload
from fxlib.utils.compare import same_bits
from fxlib.utils.pytree import leaves

_BATCHES: Final = 24
"""Number of batches of a loop, among which a pipeline tries its ways."""


@dataclass(slots=True, kw_only=True)
class Evaluated:
    """What came of the evaluation.

    Attributes:
        seconds: of a batch, by arm, loop after loop.
        bitwise: whether each arm gave the model's own results.
        taken: share of the calls, in the loops under a pipeline, whose results were there when the forward came.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    bitwise: bool = True
    taken: float = 0.0


@torch.no_grad()
def evaluated(program: Program, model: nn.Module, batch: Batch, *, rounds: int) -> Evaluated:
    """Evaluate the model in each arm, the loops of a round in random order; the first round warms up."""
    training = model.training
    model.eval()
    try:
        return _evaluated(program, model, batch, rounds)
    finally:
        model.train(training)


def _evaluated(program: Program, model: nn.Module, batch: Batch, rounds: int) -> Evaluated:
    workload = Workload(batches=[batch], mode="forward", trainers=program.launchers, contracts=program.contracts)
    graph = fxlib.capture(model, contracts=program.contracts, sample_inputs=batch.inputs)
    module = fxlib.optimize(graph, workload=workload)
    batches = [_other(batch, number) for number in range(_BATCHES)]
    pipelines: list[fxlib.Pipeline[Batch]] = []

    def ahead() -> Iterable[Batch]:
        pipelines.append(fxlib.pipeline(batches, module))
        return pipelines[-1]

    arms: dict[str, tuple[Callable[..., Any], Callable[[], Iterable[Batch]]]] = {
        "original": (model, lambda: batches),
        "fxlib": (module, lambda: batches),
        "pipeline": (module, ahead),
    }
    found, order, dice = Evaluated(seconds={arm: [] for arm in arms}), list(arms), random.Random(0)
    expected = [_tensors(model(*each.inputs)) for each in batches]
    for turn in range(rounds + 1):
        dice.shuffle(order)
        for arm in order:
            forward, loop = arms[arm]
            begun = time.perf_counter()
            results = [_tensors(forward(*each.inputs)) for each in loop()]
            if turn:
                found.seconds[arm].append((time.perf_counter() - begun) / _BATCHES)
            found.bitwise &= all(map(_are_equal, results, expected))
    calls = sum(is_call(node) or is_issue(node) for node in graph.graph.nodes)
    found.taken = sum(each.taken for each in pipelines) / (len(pipelines) * _BATCHES * calls) if calls else 0.0
    return found


def _other(batch: Batch, number: int) -> Batch:
    """Return another batch of the same shapes: its ids in another order, its features a little larger."""
    generator, made = torch.Generator().manual_seed(number), dict[int, torch.Tensor]()

    def other(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in made:  # one tensor that is given twice stays one
            if value.is_floating_point():
                made[id(value)] = value + number / _BATCHES
            elif bool((value.diff(dim=0) >= 0).all()):  # places in another tensor, which ascend
                made[id(value)] = value.clone()
            else:
                made[id(value)] = value[torch.randperm(len(value), generator=generator)]
        return made[id(value)]

    inputs = pytree.tree_map_only(torch.Tensor, other, batch.inputs)
    return Batch(inputs=inputs, target=batch.target)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(output, "") if isinstance(leaf, torch.Tensor)]


def _are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))
