"""An exported graph is the program that eager runs, and what it decided by values is watched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, FxlibWarning, WireError
from fxlib.runtime import CapturedModule
from fxlib.v1 import graph_pb2 as pb


def _other_under_compilation(x: Tensor) -> Tensor:
    compiling = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling()
    stands_in = isinstance(x, torch._subclasses.FakeTensor)
    return x * 2 if compiling or stands_in or len(x) > 4 else x * 3


@pytest.mark.slow
def test_a_program_under_export_takes_the_branches_of_eager() -> None:
    captured = fxlib.capture(_other_under_compilation, sample_inputs=[torch.ones(3)], how="export")
    assert torch.equal(captured(torch.ones(3)), torch.full((3,), 3.0))
    assert not isinstance(torch.ones(1), torch._subclasses.FakeTensor)
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.bool().all():
            return x * 2
        return (x * mask).sum(-1) if x.shape[0] > 1 else x


def _masked() -> CapturedModule:
    return fxlib.capture(Masked(), sample_inputs=[torch.randn(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])])


@pytest.mark.slow
def test_what_was_decided_by_a_mask_is_asked_again_at_each_call() -> None:
    captured, x = _masked(), torch.randn(2, 3)
    there = wire.decode(wire.encode(captured).graph, root=captured)
    other = torch.tensor([[0, 1, 0], [1, 0, 1]])
    for module in (captured, there):
        assert torch.equal(module(x, other), (x * other).sum(-1))
        with pytest.warns(FxlibWarning, match="the values of arguments answer what is asked at .*test_branches"):
            assert torch.equal(module(x, torch.ones(2, 3, dtype=torch.int64)), x * 2)


@pytest.mark.slow
def test_a_graph_alone_refuses_values_that_decide_otherwise() -> None:
    alone = wire.decode(wire.encode(_masked()).graph)
    with pytest.raises(CaptureError, match="the values of arguments answer"):
        alone(torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64))


def _writes_first(x: Tensor, mask: Tensor) -> Tensor:
    mask.mul_(0)
    return x if mask.any() else -x


def _asks_a_random_tensor(x: Tensor, mask: Tensor) -> Tensor:
    return x if (torch.rand(3) > mask).any() else -x


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_writes_first, _asks_a_random_tensor])
def test_a_decision_that_arguments_do_not_make_alone_is_refused(forward: object) -> None:
    with pytest.raises(CaptureError, match=r"torch\.export refuses the forward"):
        fxlib.capture(forward, sample_inputs=[torch.randn(3), torch.ones(3, dtype=torch.int64)], how="export")  # type: ignore[arg-type]


def _questions_of(graph: pb.Graph) -> pb.ValueCondition:
    return graph.modules[-1].graph.pytree.guards.values[0]


@pytest.mark.slow
def test_questions_of_values_are_bounded_and_of_listed_operators() -> None:
    graph = wire.encode(_masked()).graph
    _questions_of(graph).steps[0].operator = "aten::from_file"
    with pytest.raises(WireError, match="is not allowed there"):
        wire.decode(graph)
    graph = wire.encode(_masked()).graph
    _questions_of(graph).steps[0].args[0].node = 5
    with pytest.raises(WireError, match="does not come before it"):
        wire.decode(graph)
    graph = wire.encode(_masked()).graph
    for _ in range(80):
        _questions_of(graph).steps.add().CopyFrom(_questions_of(graph).steps[0])
    with pytest.raises(WireError, match="and may have 64"):
        wire.decode(graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator, argument",
    [("aten::zeros.default", "dtype"), ("aten::zeros.default", "layout"), ("aten::view.dtype", "dtype")],
)
def test_a_question_of_values_stays_inside_of_its_tensors(operator: str, argument: str) -> None:
    graph = wire.encode(_masked()).graph
    step = _questions_of(graph).steps[0]
    step.Clear()
    step.operator = operator
    step.args.add().node = 1
    step.kwargs.add(name=argument).value.integer = 300
    with pytest.raises(WireError, match=f"argument '{argument}' must be a constant"):
        wire.decode(graph)
    step.operator = "aten::all.int"
    with pytest.raises(WireError, match="is not on the allow-list"):
        wire.decode(graph)
