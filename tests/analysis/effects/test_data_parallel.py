"""What may cross DistributedDataParallel inside a model: it is described here, and needs no process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.analysis import Effects
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.data_parallel import DataParallel, DataParallelOptions
from tests.analysis.sketch import Sketch, schedule


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class LeavesOut(nn.Module):
    """Trains but a part of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.layer.parameters(recurse)


class Local(nn.Module):
    """Code that only the job has, and that a graph can hold."""

    def __init__(self, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(4, 4), work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(self.layer(x))


class WritesItsInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def wrapped(inside: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(inside, DataParallelOptions(**options), group="0", ranks=2)


def root(**parts: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def between_two_calls(part: nn.Module) -> CapturedModule:
    program = Sketch("x", "ids", root=root(part=part))
    x, ids = program.inputs
    early = program.call("early", ids)
    dense = program.module("dense", "part", x)
    late = program.call("late", ids, to="ps1")
    return program.returns(program.work("sum", torch.add, program.work("both", torch.add, early, dense), late))


@pytest.mark.parametrize(
    "inside", [nn.Linear(4, 4), fxlib.capture(Local(torch.relu)), fxlib.capture(Local(torch.relu_))]
)
def test_issues_rise_above_it_and_waits_sink_below_it(inside: nn.Module) -> None:
    order = schedule(between_two_calls(wrapped(inside)))
    assert order.index("early_issue") < order.index("late_issue") < order.index("dense")
    assert order.index("dense") < order.index("early") < order.index("late")


def test_buffers_are_broadcast_when_all_earlier_calls_have_been_answered() -> None:
    order = schedule(between_two_calls(wrapped(fxlib.capture(Buffered()))))
    assert order.index("early") < order.index("dense") < order.index("late")
    assert order.index("late_issue") < order.index("dense")


def test_buffers_that_are_not_broadcast_stop_nothing() -> None:
    order = schedule(between_two_calls(wrapped(fxlib.capture(Buffered()), forward_sync_buffers=False)))
    assert order.index("dense") < order.index("early")


def test_it_reads_the_parameters_that_its_model_s_own_method_leaves_out() -> None:
    module = between_two_calls(wrapped(fxlib.capture(LeavesOut())))
    effects = Effects.of(module)
    (dense,) = (each for each in effects.behaviours if each.operator is not None and each.operator.reduces)
    assert dense.operator is not None
    assert len(dense.operator.state) == 3


def test_it_keeps_its_order_with_others_and_with_collectives() -> None:
    program = Sketch("x", "ids", root=root(one=wrapped(nn.Linear(4, 4)), other=wrapped(nn.Linear(4, 4))))
    x, ids = program.inputs
    found = program.call("found", ids)
    slow = program.module("slow", "one", found)
    fast = program.module("fast", "other", x)
    reduced = program.collective("reduced", x)
    order = schedule(program.returns(slow, fast, reduced))
    assert order.index("slow") < order.index("fast") < order.index("reduced")


@pytest.mark.slow
def test_random_numbers_are_drawn_in_the_program_s_order() -> None:
    program = Sketch("x", "ids", root=root(part=wrapped(fxlib.capture(Local(torch.rand_like)))))
    x, ids = program.inputs
    found = program.call("found", ids)
    noise = program.work("noise", torch.rand_like, found)
    order = schedule(program.returns(noise, program.module("dense", "part", x)))
    assert order.index("noise") < order.index("dense")


def test_what_it_writes_is_written_in_the_program_s_order() -> None:
    program = Sketch("x", root=root(part=wrapped(fxlib.capture(WritesItsInput(4, 4)))))
    (x,) = program.inputs
    found = program.call("found", x)
    order = schedule(program.returns(found, program.module("dense", "part", x)))
    assert order.index("found") < order.index("dense")  # the argument in flight is what it was


def test_a_result_that_nobody_uses_is_computed_on_all_ranks() -> None:
    program = Sketch("x", root=root(part=wrapped(nn.Linear(4, 4))))
    (x,) = program.inputs
    program.module("dense", "part", x)
    rewritten = recipes.apply(program.returns(x), recipes.from_passes([("dead_code", {})])).module
    assert [node.name for node in rewritten.graph.nodes] == ["x", "dense", "output"]


def tied() -> nn.Module:
    inside, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = inside.weight
    return root(part=wrapped(inside), other=other)


@pytest.mark.parametrize("made", [tied(), root(part=wrapped(nn.Sequential(Buffered())))], ids=["tied", "unknown"])
def test_nothing_crosses_it_where_its_parameters_are_used_beside_it_or_its_code_is_unknown(made: nn.Module) -> None:
    program = Sketch("x", "ids", root=made)
    x, ids = program.inputs
    found = program.call("found", ids)
    effects = Effects.of(program.returns(found, program.module("dense", "part", x)))
    fences = [(node.name, does.fence) for node, does in zip(effects.nodes, effects.per_node, strict=True) if does.fence]
    assert fences == [("dense", Reason.OPAQUE_NEIGHBOUR)]
