"""The functional graphs of models that nobody here wrote, reinplaced by fxlib and by torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.passes.reinplace import reinplace as stock_reinplace
from torch.utils import _pytree as pytree

from benchmarks.transforms.graphs import functional_graph, reused
from fxlib.recipes import recipes
from tests.models import zoo

LIGHT = ("mobilenet_wd4", "squeezenet_v1_1", "shufflenet_g1_wd4", "resnet20_cifar10", "densenet40_k12_cifar10")
HEAVY = ("resnet10", "preresnet10", "seresnet10", "efficientnet_b0", "mobilenetv2_wd4", "shufflenetv2_wd2")


TRANSFORMERS = ("bert", "gpt2", "llama", "opt", "t5", "vit", "convnext", "wav2vec2")


def results(module: GraphModule, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs, and all that was given, afterwards."""
    torch.manual_seed(3)
    inputs = [each.clone() for each in given]
    with torch.no_grad():
        return [*pytree.tree_leaves(module(*inputs)), *inputs]


def check(model: nn.Module, *inputs: torch.Tensor) -> None:
    module, given = functional_graph(model, *inputs)
    expected = results(module, given)
    stock = stock_reinplace(copy.deepcopy(module), *given)
    for distinct in (False, True):
        with torch.no_grad():
            chosen = recipes.from_passes([("reinplace", {"distinct_inputs": distinct})])
            ours = recipes.apply(module, chosen).module
        assert reused(module, ours) >= reused(module, stock) > 0
        assert all(torch.equal(one, other) for one, other in zip(expected, results(ours, given), strict=True))


def test_a_transformer_layer_reuses_no_less_than_torch() -> None:
    check(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*LIGHT, *HEAVY])
def test_a_model_reuses_no_less_than_torch_and_gives_the_same_bits(name: str, *, training: bool) -> None:
    model, inputs = zoo.build(name, training=training)
    check(model, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_reuses_no_less_than_torch_and_gives_the_same_bits(name: str) -> None:
    model, inputs = zoo.build(name)
    check(model, *inputs)
