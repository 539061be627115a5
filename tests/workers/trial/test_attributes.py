"""What modules keep besides tensors comes back, shared as it was."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

from fxlib_workers.trial.attributes import AttributeSnapshot, attributes_of


class Keeps(nn.Module):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept
        self.layer = nn.Linear(2, 2)


def test_a_module_keeps_what_is_neither_a_tensor_nor_a_module_nor_of_every_module() -> None:
    module = Keeps(3)
    module.rows = torch.ones(2)
    assert attributes_of(module) == {"kept": 3}
    assert attributes_of(module.layer) == {"in_features": 2, "out_features": 2}


@pytest.mark.parametrize(
    "kept, change",
    [
        ({1: torch.ones(2)}, lambda kept: kept[1].add_(1)),
        ({}, lambda kept: kept.update({1: torch.ones(2)})),
        (defaultdict(list, {1: [2]}), lambda kept: kept[3]),
        ([1], lambda kept: kept.append(2)),
        ({1}, lambda kept: kept.clear()),
        (deque([1], maxlen=2), lambda kept: kept.append(2)),
    ],
)
def test_a_container_gets_its_contents_back(kept: Any, change: Any) -> None:
    module, before = Keeps(kept), repr(kept)
    snapshot = AttributeSnapshot(module)
    for _ in range(2):
        change(module.kept)
        assert repr(module.kept) != before
        snapshot.restore()
        assert (module.kept is kept, repr(kept)) == (True, before)


def test_attributes_that_were_set_since_are_gone_and_those_that_were_deleted_are_back() -> None:
    module = Keeps(3)
    snapshot = AttributeSnapshot(module)
    del module.kept
    vars(module)["other"] = 4
    snapshot.restore()
    assert attributes_of(module) == {"kept": 3}


def test_what_several_modules_share_they_still_do() -> None:
    module = Keeps({})
    module.inner = Keeps((module.kept, module.layer.weight, module))
    snapshot = AttributeSnapshot(module)
    snapshot.restore()
    rows, weight, root = module.inner.kept
    assert weight is module.layer.weight
    assert root is module
    module.kept[1] = 2
    snapshot.restore()
    assert module.kept == rows == {}


def test_what_cannot_be_copied_stays() -> None:
    lock = threading.Lock()
    module = Keeps({"lock": lock})
    snapshot = AttributeSnapshot(module)
    module.kept["count"] = 1
    snapshot.restore()
    assert module.kept == {"lock": lock, "count": 1}
