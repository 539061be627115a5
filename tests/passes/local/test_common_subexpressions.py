"""Equal work on equal values is done once, where nobody could tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import fxlib
from fxlib.analysis.effects.local_work import Escapes
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from tests.analysis.sketch import Sketch
from tests.models.nets import applied, changes, reasons

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Program(nn.Module):
    """A function as a module with one weight."""

    def __init__(self, body: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self, x)


def _noise(_: nn.Module, x: Tensor) -> Tensor:
    return torch.rand_like(x) + torch.rand_like(x)


def _write_between(_: nn.Module, x: Tensor) -> Tensor:
    y = x + 1
    first = y.exp()
    y.mul_(2)
    return first + y.exp()


def _written_result(_: nn.Module, x: Tensor) -> Tensor:
    first, second = x.exp(), x.exp()
    first.add_(1)
    return first * second


def _two_outputs(_: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x.exp()


def _numbers(_: nn.Module, x: Tensor) -> Tensor:
    return x.mul(1).sum() + x.mul(1.0).sum() + x.mul(True).sum()


def _one_of_several_written(_: nn.Module, x: Tensor) -> Tensor:
    (first, _places), (second, _places) = (torch.ops.aten.topk.default(x, 2) for _ in range(2))
    first.add_(1)
    return first * second


def _one_of_several_returned(_: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.topk.default(x, 2)[0], torch.ops.aten.topk.default(x, 2)[0]


KEPT = {
    "noise": _noise,
    "a write between": _write_between,
    "a result that is written": _written_result,
    "one of several results that is written": _one_of_several_written,
    "one of several results that is returned": _one_of_several_returned,
}


@pytest.mark.parametrize("case", [*KEPT, "two outputs", "numbers of other types"])
def test_what_only_looks_equal_is_done_twice(case: str) -> None:
    body = {**KEPT, "two outputs": _two_outputs, "numbers of other types": _numbers}[case]
    with torch.no_grad():
        model = Program(body)
        rewrite = applied(model, "common_subexpressions")
        assert changes(rewrite, "common_subexpressions") == 0
        assert fxlib.verify(model, rewrite.module, [X], grad=False)


class Meter:
    """An object whose method is called as one of a tensor's, and changes it."""

    def __init__(self) -> None:
        self.last = torch.zeros(4, 4)

    def add(self, x: Tensor) -> Tensor:
        self.last = x.exp()
        return self.last


def test_attributes_of_the_users_own_objects_are_read_anew() -> None:
    with torch.no_grad():
        program = Sketch("meter", "x")
        meter, x = program.inputs
        before = program.work("before", getattr, meter, "last")
        changed = program.work("changed", "add", meter, x)
        after = program.work("after", getattr, meter, "last")
        total = program.work("total", torch.add, changed, program.work("sub", torch.sub, after, before))
        module = program.returns(total)
        rewrite = recipes.apply(module, recipes.from_passes([("common_subexpressions", {})]))
        assert torch.equal(rewrite.module(Meter(), X)[0], module(Meter(), X)[0])


def test_equal_work_is_done_once() -> None:
    def body(module: Program, x: Tensor) -> Tensor:
        return torch.relu(x @ module.weight) + torch.relu(x @ module.weight)

    with torch.no_grad():
        model = Program(body)
        rewrite = applied(model, "common_subexpressions")
        assert changes(rewrite, "common_subexpressions") == 2  # the product, and its positive part
        assert fxlib.verify(model, rewrite.module, [X], grad=False)


def test_values_that_one_call_sends_stay_tensors_of_their_own() -> None:
    program = Sketch("x")
    places = [program.work(f"places_{number}", torch.argsort, program.inputs[0]) for number in range(4)]
    answers = [program.call("one", places[0]), program.call("both", places[1], places[2]), program.call("all", places)]
    rewrite = recipes.apply(program.returns(*answers), "training")
    assert reasons(rewrite, "common_subexpressions") == ["SENT_TOGETHER"] * 3


def test_a_value_that_stands_for_many_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed, follow = list[Node](), Escapes._senders

    def note(self: Escapes, value: Node) -> set[Node]:
        followed.append(value)
        return follow(self, value)

    monkeypatch.setattr(Escapes, "_senders", note)
    model = Program(lambda _, x: sum(torch.relu(x) * each for each in range(20)))
    with torch.no_grad():
        rewrite = applied(model, "common_subexpressions")
    assert changes(rewrite, "common_subexpressions") == 19
    assert len(followed) == len(set(followed)) == 20


def test_where_gradients_are_recorded_only_work_without_one_is_merged() -> None:
    def body(module: Program, x: Tensor) -> Tensor:
        mask, same = torch.detach(x) > 0, torch.detach(x) > 0
        return (x * module.weight)[mask].sum() + (x * module.weight)[same].exp().sum()

    model = Program(body)
    rewrite = recipes.apply(fxlib.capture(model), "training")
    assert rewrite.preserves == "bitwise"
    assert changes(rewrite, "common_subexpressions") == 2  # the detached input, and the comparison
    assert reasons(rewrite, "common_subexpressions") == ["TAKES_GRADIENT"]
    inputs = X.clone().requires_grad_()
    assert fxlib.verify(model, rewrite.module, [inputs])


FILLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an item": lambda m, x: _set(torch.zeros(4, 4), x @ m.weight),
    "a sum": lambda m, x: torch.zeros(4, 4).add_(x @ m.weight),
    "a view": lambda m, x: torch.zeros(16).index_add_(0, torch.arange(16), (x @ m.weight).flatten()).view(4, 4),
    "set to take one": lambda _, x: x.detach().requires_grad_(),
}


def _set(made: Tensor, value: Tensor) -> Tensor:
    made[:] = value
    return made


@pytest.mark.parametrize("case", FILLED)
def test_a_tensor_of_zeros_takes_the_gradient_of_what_is_written_to_it(case: str) -> None:
    def body(module: Program, x: Tensor) -> tuple[Tensor, Tensor]:
        made = FILLED[case](module, x)
        return made, (made * 3).sin().sum() + (made * 3).cos().sum() + (made * 3).exp().sum()

    rewrite = recipes.apply(fxlib.capture(Program(body)), "training")
    assert changes(rewrite, "common_subexpressions") == 0
    assert reasons(rewrite, "common_subexpressions") == ["TAKES_GRADIENT"] * 2


def test_a_forward_that_turns_gradients_on_itself_records_them() -> None:
    def body(program: Program, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.exp(program.weight * x).sin() + torch.exp(program.weight * x).cos()

    program = Program(body)
    with torch.no_grad():
        module = fxlib.capture(program)
        merged = recipes.apply(module, "training").module
        found: list[Any] = []
        for each in (program, merged):
            program.weight.grad = None
            result = each(X)
            with torch.enable_grad():
                result.sum().backward()
            found.append(program.weight.grad)
    assert torch.equal(*found)


def test_slices_that_take_gradients_are_work_that_takes_one() -> None:
    def body(module: Program, x: Tensor) -> Tensor:
        first, same = (torch.tanh(torch.ops.aten.slice.Tensor(x, 1, 1, 3)) for _ in range(2))
        return (first * module.weight[:, :2] + same * module.weight[:, 2:]).sum()

    model = Program(body)
    rewrite = recipes.apply(fxlib.capture(model), "training")
    assert changes(rewrite, "common_subexpressions") == 0
    for seed in range(3):  # sums of gradients in another order may still have the same bits
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        assert fxlib.verify(model, rewrite.module, [inputs])


@st.composite
def _programs(draw: st.DrawFn) -> Graph:
    """Programs full of repetitions, with views, writes in place and noise."""
    graph = Graph()
    values = [graph.placeholder("x"), graph.get_attr("weight")]
    for _ in range(draw(st.integers(2, 14))):
        one, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("exp", "add", "view", "mul_", "noise", "copy")))
        if kind == "exp":
            made = graph.call_method("exp", (one,))
        elif kind == "add":
            made = graph.call_function(torch.add, (one, other))
        elif kind == "view":
            made = graph.call_method("t", (one,))
        elif kind == "noise":
            made = graph.call_function(torch.rand_like, (one,))
        else:
            made = graph.call_method("clone", (one,))
            if kind == "mul_":
                graph.call_method("mul_", (made, 0.5))
        values.append(made)
    graph.output(tuple(values[draw(st.integers(1, len(values) - 1)) :]))
    return graph


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(graph=_programs(), grad=st.booleans())
def test_random_programs_stay_the_same_bit_for_bit(graph: Graph, *, grad: bool) -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
    with torch.set_grad_enabled(grad):
        plain = CapturedModule(GraphModule(root, graph), graph)
        rewrite = applied(plain, "common_subexpressions")
    found = fxlib.verify(plain, rewrite.module, [X.clone().requires_grad_(grad)], grad=grad)
    assert found, str(found)
