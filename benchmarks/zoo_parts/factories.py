"""Makers of models that nobody here wrote, small, with weights and batches drawn from a seed: nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
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
_LEFT_OUT: Final = ("torchvision", "PIL", "sklearn", "pandas")
"""Dependencies of packages whose models do nothing with them but import them."""
_VIT: Final = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": _CLASSES,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 48,
}
_SPECIAL_VITS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cait.CaiT": _VIT | {"cls_depth": 1},
    "xcit.XCiT": _VIT | {"cls_depth": 1},
    "pit.PiT": _VIT | {"depth": (1, 1)},
    "cct.cct_2": {"img_size": 32, "num_classes": _CLASSES},
    "levit.LeViT": {
        "image_size": 32, "num_classes": _CLASSES, "dim": (16, 24), "depth": (1, 1), "heads": 2, "mlp_mult": 2,
        "stages": 2,
    },
    "nest.NesT": {
        "image_size": 32, "patch_size": 4, "num_classes": _CLASSES, "dim": 16, "heads": 2, "num_hierarchies": 2,
        "block_repeats": (1, 1),
    },
    "max_vit.MaxViT": {
        "num_classes": _CLASSES, "dim": 16, "depth": (1, 1), "dim_head": 8, "dim_conv_stem": 16, "window_size": 4,
    },
    "cvt.CvT": {"num_classes": _CLASSES, "s1_emb_dim": 16, "s2_emb_dim": 24, "s3_emb_dim": 32, "s3_depth": 1},
    "t2t.T2TViT": {
        "image_size": 32, "num_classes": _CLASSES, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48,
        "t2t_layers": ((7, 4), (3, 2)),
    },
}  # fmt: skip
"""Options of those models of vit-pytorch that take others than most do."""

Asked = tuple[nn.Module, Workload]
_OPERATORS: Final = torch.library.Library("torchvision", "FRAGMENT")


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
    _describe_torchvision()  # which it imports
    module, inputs = zoo.build(net, training=training, small=True)
    if training:
        return _First(module), Workload(batches=[inputs] * _BATCHES, loss="mean")
    return module, Workload(batches=[inputs] * _BATCHES, mode="forward")


def timm(net: str, training: bool = False) -> Asked:
    """Make a net of timm, which may be installed without what it depends on."""
    leave_out()
    module: Any = import_module("timm").create_model(net, num_classes=_CLASSES)
    zoo.randomize(module)
    return _classifier(module, (2, *module.pretrained_cfg["input_size"]), training=training)


def torchvision(net: str, training: bool = False) -> Asked:
    """Make a net of torchvision, which may be installed beside a torch that it was not built for."""
    _describe_torchvision()
    options = {"weights_backbone": None} if net.startswith("lraspp") else {}
    module = import_module("torchvision.models").get_model(net, weights=None, num_classes=_CLASSES, **options)
    zoo.randomize(module)
    if not options:
        return _classifier(module, (2, 3, 64, 64), training=training)
    workload = Workload(batches=[torch.randn(2, 3, 64, 64)] * _BATCHES, mode="forward")  # a map of classes, in a dict
    return module.train(training), workload


def vit_pytorch(net: str, training: bool = False) -> Asked:
    """Make a model of vit-pytorch, by the name of its file and its class."""
    leave_out()
    place, name = net.split(".")
    module = getattr(import_module(f"vit_pytorch.{place}"), name)(**_SPECIAL_VITS.get(net, _VIT))
    zoo.randomize(module)
    return _classifier(module, (2, 3, 32, 32), training=training)


def leave_out() -> None:
    """Have packages be imported without what their models do not need."""
    _describe_torchvision()
    if not any(isinstance(each, _LeftOut) for each in sys.meta_path):
        sys.meta_path.append(_LeftOut())


def _describe_torchvision() -> None:
    """Have torchvision be imported, if it is installed, also where its operators were built for another torch."""
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:  # it tells torch more of these two operators, and they are not there
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        import_module("torchvision")


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
