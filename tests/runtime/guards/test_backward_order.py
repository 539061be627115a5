"""Programs to which the order in which backward runs shows: a rewrite that changes it leaves them to the original."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.backward_order import BackwardOrder
from fxlib.runtime.guards.tensor_metadata import TiedParameters
from tests.random_programs.simulation import count, simulated


class Branches(nn.Module):
    """What needs the remote result stands first, and what a rewrite has it wait behind stands last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()  # the uses of what takes a gradient keep their order
        rows: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        first = self.first(rows * x).tanh()
        second = self.second(x).tanh() + self.third(x).sigmoid()
        return first + second


class InLine(Branches):
    """The same, with all in the line of the remote result: nothing moves but its issue."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        hidden = self.first(self.third(x).relu()).tanh()
        rows: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        return self.second(rows * hidden)


def plain(module: nn.Module, x: torch.Tensor) -> None:
    module(x).square().mean().backward()


def penalized(module: nn.Module, x: torch.Tensor) -> None:
    """Add the squares of the loss' slopes to the loss."""
    loss = module(x).square().mean()
    slopes = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    (loss + sum(each.square().sum() for each in slopes)).backward()


def steps(module: nn.Module, step: Callable[[nn.Module, torch.Tensor], None], many: int) -> list[bytes]:
    """Run steps; return, for each, every bit of the parameters' gradients."""
    found: list[bytes] = []
    for number in range(many):
        torch.manual_seed(number)
        module.zero_grad()
        with simulated(0):
            step(module, torch.randn(2, 4))
        found.append(b"".join(each.grad.numpy().tobytes() for each in module.parameters() if each.grad is not None))
    return found


def rewritten(model: nn.Module, *, reorders: bool) -> CapturedModule:
    module = fxlib.optimize(fxlib.capture(model))
    assert isinstance(module, CapturedModule)
    assert module._program.reorders_backward is reorders
    return module


def draw(gradient: torch.Tensor) -> torch.Tensor:
    """Add noise, as private training does."""
    return gradient + torch.randn_like(gradient)


def write_noise(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad += torch.randn_like(parameter.grad)


@pytest.mark.parametrize("how", ["hook", "hook after accumulation"])
def test_hooks_that_draw_from_one_generator_run_in_the_programs_order(how: str) -> None:
    model = Branches()
    module = rewritten(model, reorders=True)
    undisturbed = steps(model, plain, 2)
    assert steps(module, plain, 2) == undisturbed
    for each in model.parameters():
        each.register_hook(draw) if how == "hook" else each.register_post_accumulate_grad_hook(write_noise)
    with pytest.warns(FxlibWarning, match="have hooks"):
        assert steps(module, plain, 3) == steps(model, plain, 3) != undisturbed


class OfArguments(Branches):
    def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x = x.detach()
        rows: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        first = self.first(rows * x + more[0]).tanh()
        second = self.second(x + more[1]).tanh() + self.third(x).sigmoid()
        return first + second


@pytest.mark.parametrize("hooked_from", [0, 1])
def test_hooks_of_arguments_that_were_made_before_the_first_step_run_in_the_programs_order(hooked_from: int) -> None:
    def gradients(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(7)
        batches = [[torch.randn(2, 4, requires_grad=True) for _ in range(2)] for _ in range(3)]
        for each in itertools.chain(*batches[hooked_from:]):
            each.register_hook(draw)
        for batch in batches:
            with simulated(0):
                module(torch.ones(2, 4), batch).square().mean().backward()
        return [each.grad for batch in batches for each in batch if each.grad is not None]

    model = OfArguments()
    module = rewritten(model, reorders=True)
    with pytest.warns(FxlibWarning, match="have hooks"):
        found = gradients(module)
    assert all(map(torch.equal, found, gradients(model)))


def test_one_hook_alone_is_no_reason_and_neither_are_hooks_where_only_calls_move() -> None:
    model, in_line = Branches(), InLine()
    model.first.weight.register_hook(draw)
    for each in in_line.parameters():
        each.register_hook(draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps(rewritten(model, reorders=True), plain, 3) == steps(model, plain, 3)
        assert steps(rewritten(in_line, reorders=False), plain, 3) == steps(in_line, plain, 3)


class Several(Branches):
    """Returns the values on the way, too."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach()
        rows: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        first, second = self.first(rows), self.second(x)
        return first, (second, first + second * self.third(x))


class Written(Several):
    """Writes to them, in the other order."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach()
        second = self.second(x)
        first = self.first(rpc.rpc_sync("ps0", count, args=(x,)))
        first.mul_(0.5)
        second.add_(0.3)
        return first, (second, first + second * self.third(x))


class Pair(NamedTuple):
    first: torch.Tensor
    others: tuple[torch.Tensor, torch.Tensor]


class Named(Several):
    """Returns them in an object."""

    def forward(self, x: torch.Tensor) -> Any:
        return Pair(*super().forward(x))


def hooked(module: nn.Module, x: torch.Tensor) -> None:
    first, (second, both) = module(x)
    first.register_hook(draw)
    second.register_hook(draw)
    both.square().mean().backward()


@pytest.mark.parametrize("kind", [Several, Written, Named])
def test_hooks_of_several_results_run_in_the_programs_order(kind: type[Several]) -> None:
    model = kind()
    module = rewritten(model, reorders=True)
    assert steps(module, hooked, 3) == steps(model, hooked, 3)
    assert fxlib.usage(module).original == {}


def test_one_parameters_hook_counts_where_several_results_may_have_some() -> None:
    model = Several()
    module = rewritten(model, reorders=True)
    model.first.weight.register_hook(draw)
    with pytest.warns(FxlibWarning, match="have hooks"):
        assert steps(module, hooked, 3) == steps(model, hooked, 3)


class Perturbed(nn.Module):
    """Takes the gradient of a leaf that it makes, which has several uses around calls."""

    def forward(self, x: torch.Tensor) -> Any:
        noise = torch.zeros_like(x, requires_grad=True)
        rows: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        return noise, ((rows + noise) * 1.1 + (rows - noise) * 0.37 + (x + noise) * 0.3).sin()


def test_a_leaf_made_in_the_forward_adds_its_gradients_up_in_the_programs_order() -> None:
    captured = fxlib.capture(Perturbed())
    module = fxlib.optimize(captured)

    def uses(module: Any) -> list[str]:
        (noise,) = module.graph.find_nodes(op="call_function", target=torch.zeros_like)
        return [node.name for node in module.graph.nodes if noise in node.all_input_nodes]

    def noise_of(model: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for number in range(3):
            torch.manual_seed(number)
            with simulated(0):
                noise, out = model(torch.randn(2, 4))
                (out.exp() * torch.randn_like(out)).sum().backward()
            assert noise.grad is not None
            found.append(noise.grad)
        return found

    assert uses(module) == uses(captured)
    assert all(map(torch.equal, noise_of(module), noise_of(Perturbed())))
    assert fxlib.usage(module).original == {}


def test_hooks_that_are_removed_are_no_reason_any_more() -> None:
    model = Branches()
    module = rewritten(model, reorders=True)
    hooks = [each.register_hook(draw) for each in model.parameters()]
    with pytest.warns(FxlibWarning, match="have hooks"):
        steps(module, plain, 1)
    for each in hooks:
        each.remove()
    assert module._fxlib.conditions.backward_shows((), returns_several=False) == ""


def test_after_a_backward_that_made_a_graph_the_original_runs_with_its_second_derivatives() -> None:
    model = Branches()
    module = rewritten(model, reorders=True)
    assert steps(module, plain, 1) == steps(model, plain, 1)
    with pytest.warns(FxlibWarning, match="create_graph") as caught:
        found = steps(module, penalized, 4)
    assert found[1:] == steps(model, penalized, 4)[1:]
    assert sum("second derivatives of this step" in str(each.message) for each in caught) == 1


@dataclass
class Results:
    out: torch.Tensor


@pytest.mark.parametrize(
    "packed",
    [lambda x: (x, x), lambda x: (1.0, (x,)), lambda x: {"out": [x]}, Results],
    ids=["tuple", "tuple in a tuple", "list in a dict", "dataclass"],
)
def test_a_backward_that_makes_a_graph_is_noticed_wherever_the_result_holds_what_it_starts_from(
    packed: Callable[[torch.Tensor], Any],
) -> None:
    order = BackwardOrder()
    x = torch.ones(2, requires_grad=True)
    y = x.square()
    order.watch(packed(y))
    with pytest.warns(FxlibWarning, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert "create_graph" in order.shows((), TiedParameters(nn.Module(), None), returns_several=False)


def test_second_derivatives_are_the_same_where_only_calls_move() -> None:
    model = InLine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps(rewritten(model, reorders=False), penalized, 3) == steps(model, penalized, 3)


def test_what_is_learnt_of_hooks_costs_a_look_at_a_number_while_none_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = rewritten(Branches(), reorders=True)
    steps(module, plain, 2)

    def looked(value: object) -> bool:
        assert not isinstance(value, nn.Parameter), "looked at parameters again"
        return False

    monkeypatch.setattr("fxlib.runtime.guards.backward_order._has_hooks", looked)
    steps(module, plain, 3)
