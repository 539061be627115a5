"""The recipe `inference` on models that nobody here wrote."""

from __future__ import annotations

import copy

import pytest
import torch

import fxlib
from fxlib.recipes import recipes
from tests.models import zoo
from tests.models.nets import changes, graph_runs

_NAMES = ["resnet20_cifar10", "squeezenet_v1_1", "mobilenet_wd4", "resnet50", "densenet121", "peleenet"]
_NAMES += ["seresnet10", "resnext14_16x4d", "dla34", "preresnet10", "dpn68"]


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
@torch.no_grad()
def test_a_net_is_as_right_as_before(name: str) -> None:
    model, inputs = zoo.build(name, small=True)
    rewrite = recipes.apply(fxlib.capture(model), "inference")
    assert changes(rewrite, "fold_norms") + changes(rewrite, "channels_last") > 0
    made = graph_runs(rewrite)(*inputs)
    own = model(*inputs)
    truth = copy.deepcopy(model).double()(*(each.double() for each in inputs))
    size = truth.abs().max()
    assert (made - truth).abs().max() <= 8 * (own - truth).abs().max() + 64 * torch.finfo(made.dtype).eps * size
    assert made.stride() == own.stride()
