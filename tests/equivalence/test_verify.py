"""Two modules are compared in all that they leave behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlib
from fxlib import verify
from fxlib.equivalence.verify import stands_in
from fxlib.errors import PassError


class Model(nn.Module):
    """Everything that can differ: set `twist` to make it so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.twist = nn.Linear(3, 3), nn.BatchNorm1d(3), ""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.norm(self.layer(x))
        if self.twist == "input":
            x.detach().add_(1)
        if self.twist == "random":
            torch.rand(1)
        if self.twist == "buffer":
            self.get_buffer("norm.running_mean").add_(1)
        if self.twist == "gradient":
            y = y + (x - x.detach()) * 0
        if self.twist == "error":
            raise ValueError("out of stock")
        return {"y": y.double() if self.twist == "dtype" else y}


def pair(twist: str) -> tuple[Model, Model]:
    one = Model()
    other = copy.deepcopy(one)
    other.twist = twist
    return one, other


def test_a_module_is_itself() -> None:
    verification = verify(*pair(""), [torch.randn(4, 3, requires_grad=True)])
    assert verification
    assert "grad of layer.weight" in verification.compared
    assert "random generator" in verification.compared


@pytest.mark.parametrize(
    "twist, where",
    [
        ("input", "input[0][0]"),
        ("random", "random generator"),
        ("buffer", "after the run, norm.running_mean"),
        ("dtype", "output['y']"),
        ("error", "error"),
    ],
)
def test_every_difference_is_found_and_named(twist: str, where: str) -> None:
    verification = verify(*pair(twist), [torch.randn(4, 3)])
    assert not verification
    assert where in [each.where for each in verification.differences]


@pytest.mark.parametrize("frees", [False, True])
def test_a_tensor_whose_memory_is_freed_is_compared_by_that_alone(frees: bool) -> None:
    class Gathered(nn.Module):
        def __init__(self, frees: bool) -> None:
            super().__init__()
            self.whole, self.frees = torch.ones(3), frees

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.frees:
                self.whole.untyped_storage().resize_(0)
            return x * 2

    one, other = Gathered(True), Gathered(frees)
    found = [str(each) for each in verify(one, other, [torch.ones(3)], reference="float64").differences]
    assert found == ([] if frees else ["after the run, whole: only the first module has it"])
    one(torch.ones(3))
    assert bool(verify(one, one, [torch.ones(3)], rtol=1e-3))


@pytest.mark.slow
def test_one_bit_is_a_difference_unless_tolerated() -> None:
    one, other = pair("")
    with torch.no_grad():
        other.norm.bias.add_(1e-7)
    x = torch.randn(4, 3)
    assert not verify(one, other, [x])
    assert verify(one, other, [x], rtol=1e-3, atol=1e-3)


def test_bits_are_compared_and_not_values() -> None:
    class Zero(nn.Module):
        def __init__(self, sign: float) -> None:
            super().__init__()
            self.sign = sign

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.0 * self.sign

    assert not verify(Zero(1.0), Zero(-1.0), [torch.ones(2)])
    assert verify(Zero(float("nan")), Zero(float("nan")), [torch.ones(2)])


def test_modules_inputs_and_generator_are_left_as_they_were() -> None:
    one, other = pair("input")
    state, random, x = copy.deepcopy(one.state_dict()), torch.get_rng_state(), torch.ones(4, 3)
    verify(one, other, [x])
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in state.items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(x, torch.ones(4, 3))
    assert one.layer.weight.grad is None


def test_inputs_that_share_memory_still_do() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return view.clone()

    x = torch.zeros(2, 2)
    verification = verify(Writes(), Writes(), [x, x[0]])
    assert verification
    assert torch.equal(x, torch.zeros(2, 2))


def test_a_lone_tensor_is_refused() -> None:
    with pytest.raises(PassError, match="a sequence of the arguments"):
        verify(*pair(""), torch.ones(2))  # type: ignore[arg-type]


def test_further_calls_are_made_one_after_another() -> None:
    one, other = pair("")
    verification = verify(one, other, [torch.randn(4, 3)], [torch.randn(5, 3)])
    assert verification
    assert {"batch 0, output['y']", "batch 1, output['y']"} <= set(verification.compared)
    other.twist = "buffer"
    assert not verify(one, other, [torch.randn(4, 3)], [torch.randn(5, 3)])


def test_errors_are_measured_against_each_other_and_against_float64() -> None:
    one, other = pair("")
    with torch.no_grad():
        other.norm.weight.mul_(1 + 1e-4)
    found = verify(one, other, [torch.randn(4, 3)], rtol=1e-2, atol=1e-2, reference="float64")
    assert found
    (output,) = (each for each in found.distances if each.where == "output['y']")
    assert output.first_from_reference is not None
    assert output.second_from_reference is not None
    assert 1e-6 < output.relative < 1e-2
    assert output.relative <= found.max_relative_error
    assert output.absolute <= found.max_absolute_error
    assert output.first_from_reference < 1e-5 < output.second_from_reference
    assert "relative error against float64" in str(found)


def test_a_program_that_names_narrow_dtypes_has_a_reference() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() @ torch.eye(3, dtype=torch.float32)).to(torch.float32) / torch.full((3,), 3.0)

    (output,) = verify(Narrow(), Narrow(), [torch.randn(4, 3)], reference="float64").distances[:1]
    assert output.first_from_reference is not None
    assert 0 < output.first_from_reference < 1e-6


@pytest.mark.slow
def test_copies_in_float64_take_as_long_as_the_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor's copy is handed all that was copied before it, and that holds no dtypes to widen."""
    seen = 0
    tree_map_only = pytree.tree_map_only

    def counted(kind: Any, wide: Any, given: Any) -> Any:
        nonlocal seen
        seen = max(seen, len(pytree.tree_leaves(given)))
        return tree_map_only(kind, wide, given)

    monkeypatch.setattr(pytree, "tree_map_only", counted)
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(20)))
    assert verify(model, model, [torch.randn(4, 3)], reference="float64")
    assert 0 < seen < 20


def test_randomness_has_no_reference() -> None:
    _, one = pair("random")
    with pytest.raises(PassError, match="draws random numbers"):
        verify(one, one, [torch.randn(4, 3)], reference="float64")


def test_inputs_that_neither_module_takes_are_an_error_with_its_place() -> None:
    one, other = pair("")
    with pytest.raises(PassError, match=r"test_verify.py:\d+: neither module runs on these inputs: RuntimeError"):
        verify(one, other, [torch.randn(4, 5)])
    graph = fxlib.capture(one)
    with pytest.raises(PassError, match=r"node 'layer' in 'layer' \(.*test_verify.py:\d+\): neither module"):
        verify(graph, graph, [torch.randn(4, 5)])


class Fails(nn.Module):
    """Raises an error in its call `at`."""

    def __init__(self, error: Exception, at: int = 0) -> None:
        super().__init__()
        self.error, self.at = error, torch.tensor(at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.at:
            raise self.error
        self.at.sub_(1)
        return x


@pytest.mark.parametrize("other", [Fails(RuntimeError("too long")), Fails(ValueError("too long"), at=1)])
def test_errors_of_another_class_or_in_another_call_are_differences(other: Fails) -> None:
    x = torch.ones(2)
    verification = verify(Fails(ValueError("too long")), other, [x], [x])
    assert "batch 0, error" in [each.where for each in verification.differences]


def test_it_says_where_a_graph_was_not_what_ran() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    fast = fxlib.optimize(fxlib.capture(model), "inference")
    assert "original forward ran, not its graph: gradients are recorded" in str(verify(model, fast, [torch.ones(2, 3)]))
    assert not verify(model, fast, [torch.ones(2, 3)], rtol=1e-5, atol=1e-5, grad=False).notes
    assert not stands_in(fast, grad=False)
