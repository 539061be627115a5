"""Makers of models that nobody here wrote, small, with weights and batches drawn from a seed: nothing is downloaded."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from typing_extensions import override

from fxlib import Workload
from fxlib.spec.inputs import Batch
from tests.models import zoo

_CLASSES: Final = 10
_BATCHES: Final = 2
_LEFT_OUT: Final = ("torchvision", "PIL")
"""Dependencies of timm that its models do nothing with but import them."""

Asked = tuple[nn.Module, Workload]


def pytorchcv(net: str, training: bool = False) -> Asked:
    """Make a net of pytorchcv: one that the tests have as well, or any other one for pictures of CIFAR's size."""
    if net in zoo.models(family="convolutional"):
        module, (pictures,) = zoo.build(net, training=training, small=True)
        return _classifier(module, tuple(pictures.shape), training=training)
    from pytorchcv.model_provider import get_model

    module = get_model(net, num_classes=_CLASSES)
    zoo.randomize(module)
    return _classifier(module, (2, 3, *module.in_size), training=training)


def transformers(net: str, training: bool = False) -> Asked:
    """Make a model of transformers, of two layers; in training, its loss is the mean of its first output."""
    module, inputs = zoo.build(net, training=training, small=True)
    if training:
        return _First(module), Workload(batches=[inputs] * _BATCHES, loss="mean")
    return module, Workload(batches=[inputs] * _BATCHES, mode="forward")


def timm(net: str, training: bool = False) -> Asked:
    """Make a net of timm, which may be installed without what it depends on."""
    if not any(isinstance(each, _LeftOut) for each in sys.meta_path):
        sys.meta_path.append(_LeftOut())
    import timm as library

    module: Any = library.create_model(net, num_classes=_CLASSES)
    zoo.randomize(module)
    return _classifier(module, (2, *module.pretrained_cfg["input_size"]), training=training)


def _classifier(module: nn.Module, size: tuple[int, ...], *, training: bool) -> Asked:
    pictures = [torch.randn(size) for _ in range(_BATCHES)]
    if not training:
        return module.eval(), Workload(batches=pictures, mode="forward")
    batches = [Batch(inputs=(each,), target=torch.randint(_CLASSES, size[:1])) for each in pictures]
    return module.train(), Workload(batches=batches, loss="cross_entropy")


class _First(nn.Module):
    """The first output of a model that has several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, *inputs: Tensor) -> Tensor:
        first: Tensor = self.model(*inputs)[0]
        return first


class _LeftOut(MetaPathFinder, Loader):
    """Finds modules of what is not installed; whatever is imported from them is an empty class."""

    @override
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        left_out = fullname.partition(".")[0] in _LEFT_OUT
        return ModuleSpec(fullname, self, is_package=True) if left_out else None

    @override
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    @override
    def exec_module(self, module: ModuleType) -> None:
        def found(name: str) -> Any:
            if name == "__version__":
                return "99.0"
            if name.startswith("__"):
                raise AttributeError(name)
            return _Anything(name, (), {})

        module.__getattr__ = found  # type: ignore[method-assign]


class _Anything(type):
    """A class that has any attribute."""

    def __getattr__(cls, name: str) -> mock.MagicMock:
        return mock.MagicMock(name=name)
