"""Parametrized modules and modules with forward hooks are traced through, so that another process can run the graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.nn.utils import parametrizations as P
from torch.nn.utils import parametrize

import fxlib
from fxlib.capture.trace.traced_through import WHOLE
from fxlib.recipes import recipes
from tests.capture.servers import lookup
from tests.wire.support import round_trip

X = torch.randn(5, 4)


class Symmetric(nn.Module):
    """A parametrization of the user's own, which decides by a shape."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] != weight.shape[-1]:
            return weight
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    """One with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


def parametrized(*parametrizations: nn.Module) -> nn.Module:
    linear = nn.Linear(4, 4)
    for each in parametrizations:
        parametrize.register_parametrization(linear, "weight", each)
    return linear


def hooked(register: Callable[[nn.Module], Any], module: nn.Module | None = None) -> nn.Module:
    module = module or nn.Linear(4, 4)
    register(module)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: P.weight_norm(nn.Linear(4, 4)),
    "orthogonal by matrix_exp": lambda: P.orthogonal(nn.Linear(4, 3)),
    "orthogonal by cayley": lambda: P.orthogonal(nn.Linear(4, 6), orthogonal_map="cayley"),
    "orthogonal by householder": lambda: P.orthogonal(nn.Linear(4, 4), orthogonal_map="householder"),
    "spectral_norm": lambda: P.spectral_norm(nn.Linear(4, 4), n_power_iterations=2),
    "spectral_norm in eval mode": lambda: P.spectral_norm(nn.Linear(4, 4)).eval(),
    "spectral_norm of a bias": lambda: P.spectral_norm(nn.Linear(4, 4), name="bias"),
    "one's own": lambda: parametrized(Symmetric()),
    "several": lambda: parametrized(Symmetric(), Scaled(), nn.Softplus()),
    "of weight and bias": lambda: P.weight_norm(P.weight_norm(nn.Linear(4, 4)), name="bias"),
    "in a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), P.spectral_norm(nn.Conv1d(2, 3, 1)), P.weight_norm(nn.Conv1d(3, 2, 1)), nn.Flatten()
    ),
    "forward hook": lambda: hooked(lambda each: each.register_forward_hook(lambda module, given, made: made * 2)),
    "pre-hook": lambda: hooked(lambda each: each.register_forward_pre_hook(lambda module, given: (given[0] + 1,))),
    "hook with keywords": lambda: hooked(
        lambda each: each.register_forward_hook(lambda module, given, keywords, made: made - 1, with_kwargs=True)
    ),
    "hook that reads the module": lambda: hooked(
        lambda each: each.register_forward_hook(lambda module, given, made: made + module.weight.mean())
    ),
    "both": lambda: hooked(
        lambda each: each.register_forward_hook(lambda module, given, made: made * 2), P.weight_norm(nn.Linear(4, 4))
    ),
}


SHAPES = (nn.Flatten, nn.Unflatten)


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Three steps: outputs, gradients, and then parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        made = model(X)
        made.square().sum().backward()
        found += [made, *(each.grad for each in model.parameters() if each.grad is not None)]
        optimizer.step()
    return [each.detach().clone() for each in (*found, *model.parameters(), *model.buffers())]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_they_train_bit_for_bit_here_rewritten_and_in_another_process(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), MODELS[name]())
    copies = [copy.deepcopy(model) for _ in range(3)]

    captured = fxlib.capture(copies[0])
    rewritten = recipes.apply(fxlib.capture(copies[1]), "training").module
    elsewhere = round_trip(fxlib.capture(copies[2]))

    expected = trained(model)
    for each in (captured, rewritten, elsewhere):
        made = trained(each)
        assert len(made) == len(expected)
        assert all(map(torch.equal, made, expected))
    assert fxlib.usage(captured).original == {}
    called = [node.target for node in captured.graph.nodes if node.op == "call_module"]
    assert {type(captured.get_submodule(str(each))) for each in called} <= {nn.Linear, nn.Softplus, *SHAPES}
    assert "1" not in called


SEEN: list[Any] = []
COUNT = [0]


def keeps(module: nn.Module, given: Any, made: torch.Tensor) -> None:
    SEEN.append(made)


def counts(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
    COUNT[0] += 1
    return made + COUNT[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: hooked(lambda each: each.register_forward_hook(keeps)), "test_traced_through.py"),
        (lambda: hooked(lambda each: each.register_forward_hook(counts)), "changes what a list holds"),
        (lambda: hooked(lambda each: each.register_forward_hook(lambda *_: None), nn.BatchNorm1d(4)), "decides"),
        (lambda: hooked(lambda each: each.register_full_backward_hook(lambda *_: None)), None),
    ],
    ids=["a hook that keeps", "a hook that counts", "a module that decides", "a backward hook"],
)
def test_what_cannot_be_traced_stays_whole_and_says_why(make: Callable[[], nn.Module], why: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(P.weight_norm(nn.Linear(4, 4)), make())
    copied = copy.deepcopy(model)

    captured = fxlib.capture(model)
    COUNT[0] = 0
    made = trained(captured)
    COUNT[0] = 0

    assert all(map(torch.equal, made, trained(copied)))
    (whole,) = captured.graph.find_nodes(op="call_module")
    assert whole.target == "1"
    assert (why or "") in whole.meta.get(WHOLE, "")
    assert (WHOLE in whole.meta) == (why is not None)


@pytest.mark.slow
def test_a_hook_that_was_frozen_is_seen_to_count(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    hook = hooked(lambda each: each.register_forward_hook(counts))
    model = nn.Sequential(P.weight_norm(nn.Linear(4, 4)), hook)
    copied = copy.deepcopy(model)
    request.addfinalizer(gc.unfreeze)
    gc.freeze()

    captured = fxlib.capture(model)
    COUNT[0] = 0
    made = trained(captured)
    COUNT[0] = 0

    assert all(map(torch.equal, made, trained(copied)))


def test_another_hook_or_parametrization_runs_the_original() -> None:
    model = nn.Sequential(P.weight_norm(nn.Linear(4, 4)))
    captured = fxlib.capture(model)
    hook = model[0].register_forward_hook(lambda module, given, made: made * 3)
    assert torch.equal(captured(X), model(X))
    assert sum(fxlib.usage(captured).original.values()) == 1
    hook.remove()
    captured(X)
    assert fxlib.usage(captured).graphs["main"] == 1
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(captured(X), model(X))
    assert sum(fxlib.usage(captured).original.values()) == 2


@pytest.mark.slow
def test_what_a_hook_reads_is_watched() -> None:
    factor = [2.0]
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, given, made: made * factor[0])
    captured = fxlib.capture(model)
    factor[0] = 5.0
    assert torch.equal(captured(X), model(X))
    assert sum(fxlib.usage(captured).original.values()) == 1


def test_remote_lookups_move_past_normalized_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom = P.weight_norm(nn.Linear(4, 3))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            dense = self.bottom(x)
            return dense + rpc.rpc_sync("ps0", lookup, args=("a", rows))

    done = recipes.apply(fxlib.capture(Model()))
    assert [call.action for call in done.calls] == ["moved"]
