"""Small nets for the passes of inference, and how far from the truth a rewritten one is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fxlib
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Rewrite
from tests.models.zoo import randomize

Options = Mapping[str, object]

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
SOUND = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(3))


def made(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return the model in eval mode, with statistics and affine weights of its norms drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        randomize(model)
    return model.eval()


def applied(model: nn.Module, *passes: str, **options: object) -> Rewrite:
    """Capture a model and apply passes to it, the last of them with options."""
    graph = model if isinstance(model, GraphModule) else fxlib.capture(model)
    listed: list[tuple[str, Options]] = [(name, {}) for name in passes[:-1]]
    return recipes.apply(graph, recipes.from_passes([*listed, (passes[-1], options)]))


def reasons(rewrite: Rewrite, name: str) -> list[str]:
    """Return the names of the reasons why a pass declined what it declined."""
    return [each.reason.name for report in rewrite.passes if report.name == name for each in report.declined]


def changes(rewrite: Rewrite, name: str) -> int:
    """Return how much a pass changed."""
    return next(report.changes for report in rewrite.passes if report.name == name)


def graph_runs(rewrite: Rewrite) -> GraphModule:
    """Return the rewritten module without its original, so that nothing but its graph can run."""
    module: Any = rewrite.module
    module._fxlib.original = None
    return module


@torch.no_grad()
def assert_same_on_integers(rewrite: Rewrite, *inputs: Tensor) -> None:
    """Check that operators of an int8 graph, one by one on plain integers, have the bits of the graph as it runs."""
    module: Any = graph_runs(rewrite)
    found = module(*inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._fxlib.quantized, "of", lambda _: None)
        expected = module(*inputs)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@torch.no_grad()
def assert_as_right(model: nn.Module, rewrite: Rewrite, *inputs: Tensor) -> None:
    """Check the graph against the model in float64, within a bound that its dtype gives, and the model against itself.

    The bound is that of the model's own error, and some roundings more for a net as small as those here.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    truth = copy.deepcopy(model).double()(*(each.double() for each in inputs))
    own, made = model(*inputs), graph_runs(rewrite)(*inputs)
    size = truth.abs().max()
    error, allowed = (made - truth).abs().max() / size, (own - truth).abs().max() / size
    assert error <= 2 * allowed + 16 * torch.finfo(made.dtype).eps
    assert made.shape == own.shape
    assert made.stride() == own.stride()
    assert list(rewrite.module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def called(module: GraphModule) -> list[str]:
    """Return what the nodes call: names of functions and methods, and classes of modules."""
    return [_name(module, node) for node in module.graph.nodes if node.op.startswith("call")]


def _name(module: GraphModule, node: Node) -> str:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__
    return getattr(node.target, "__name__", str(node.target))
