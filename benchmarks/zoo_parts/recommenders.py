"""Makers of recommenders that nobody here wrote, small, with weights and batches drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from threading import Thread
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.zoo_parts.factories import leave_out
from fxlib import Workload
from fxlib.spec.inputs import Batch
from tests.models import zoo

_ROWS: Final = 8
_ITEMS: Final = 20
"""Number of values that a sparse feature has."""
_WIDTH: Final = 8
"""Width of an embedding."""
_HISTORY: Final = 5
_SPARSE: Final = ("user", "item", "category", "city")
_DENSE: Final = ("age", "price")
_MLP: Final = {"dims": [16, 8], "dropout": 0.1, "activation": "relu"}
_TOWER: Final = {"dims": [8]}
_TASKS: Final = ["classification", "classification"]
_WITHOUT_DENSE: Final = {"AFM", "CCPM"}
_HIDDEN: Final[Mapping[str, Any]] = {"dnn_hidden_units": (16, 8)}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "AFM": {},
    "MLR": {},
    "AFN": {"ltl_hidden_size": 16, "afn_dnn_hidden_units": (16, 8)},
}


def deepctr_torch(net: str, training: bool = False) -> tuple[nn.Module, Workload]:
    """Make a model of DeepCTR-Torch, whose input is one matrix with a column for each feature."""
    leave_out()
    with mock.patch.object(Thread, "start"):  # it asks the package index for a newer version
        models = import_module("deepctr_torch.models")
    inputs = import_module("deepctr_torch.inputs")
    sparse = [inputs.SparseFeat(each, vocabulary_size=_ITEMS, embedding_dim=_WIDTH) for each in _SPARSE]
    columns = [*sparse, *(inputs.DenseFeat(each, 1) for each in _DENSE)]
    deep = sparse if net in _WITHOUT_DENSE else columns
    module = getattr(models, net)(*((deep,) if net == "PNN" else (columns, deep)), **_OPTIONS.get(net, _HIDDEN))
    ids, numbers = torch.randint(_ITEMS, (_ROWS, len(_SPARSE))), torch.rand(_ROWS, len(_DENSE))
    return _asked(module, torch.cat([ids.float(), numbers], dim=1), training=training)


def torch_rechub(net: str, training: bool = False) -> tuple[nn.Module, Workload]:
    """Make a model of Torch-RecHub, whose input is a dict with an entry for each feature."""
    leave_out()
    features = import_module("torch_rechub.basic.features")
    models = import_module(f"torch_rechub.models.{'multi_task' if net in _MULTI_TASK else 'ranking'}")
    sparse = [features.SparseFeature(each, vocab_size=_ITEMS, embed_dim=_WIDTH) for each in _SPARSE]
    dense = [features.DenseFeature(each) for each in _DENSE]
    history = [features.SequenceFeature("seen", _ITEMS, _WIDTH, pooling="concat", shared_with="item")]
    module = {**_RANKING, **_MULTI_TASK}[net](getattr(models, net), sparse, dense, history)
    batch = {each: torch.randint(_ITEMS, (_ROWS,)) for each in _SPARSE} | {each: torch.rand(_ROWS) for each in _DENSE}
    return _asked(module, batch | {"seen": torch.randint(_ITEMS, (_ROWS, _HISTORY))}, training=training)


Make = Callable[[Any, list[Any], list[Any], list[Any]], nn.Module]
_RANKING: Final[Mapping[str, Make]] = {
    "DeepFM": lambda kind, sparse, dense, _: kind(sparse + dense, sparse, _MLP),
    "WideDeep": lambda kind, sparse, dense, _: kind(sparse, sparse + dense, _MLP),
    "DCN": lambda kind, sparse, dense, _: kind(sparse + dense, 2, _MLP),
    "DCNv2": lambda kind, sparse, dense, _: kind(sparse + dense, 2, _MLP),
    "EDCN": lambda kind, sparse, _, __: kind(sparse, 2, _MLP),
    "AFM": lambda kind, sparse, _, __: kind(sparse, _WIDTH),
    "AutoInt": lambda kind, sparse, dense, _: kind(sparse, dense, mlp_params=_MLP),
    "FiBiNet": lambda kind, sparse, _, __: kind(sparse, _MLP),
    "DIN": lambda kind, sparse, _, history: kind(sparse[:1], history, sparse[1:2], _TOWER, {"dims": [8]}),
    "BST": lambda kind, sparse, _, history: kind(sparse[:1], history, sparse[1:2], _MLP, nhead=2),
}
_MULTI_TASK: Final[Mapping[str, Make]] = {
    "SharedBottom": lambda kind, sparse, dense, _: kind(sparse + dense, _TASKS, {"dims": [16]}, [_TOWER] * 2),
    "MMOE": lambda kind, sparse, dense, _: kind(sparse + dense, _TASKS, 2, {"dims": [16]}, [_TOWER] * 2),
    "PLE": lambda kind, sparse, dense, _: kind(sparse + dense, _TASKS, 1, 1, 1, {"dims": [16]}, [_TOWER] * 2),
    "ESMM": lambda kind, sparse, _, __: kind(sparse[:1], sparse[1:], {"dims": [8]}, {"dims": [8]}),
}


def _asked(module: nn.Module, given: Tensor | dict[str, Tensor], *, training: bool) -> tuple[nn.Module, Workload]:
    zoo.randomize(module)
    batches = [Batch(inputs=(given,))]
    return module.train(training), Workload(batches=batches, mode="forward")
