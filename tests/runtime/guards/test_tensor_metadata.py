"""What a graph was told of a model's tensors holds for these alone: with others, the original runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.runtime.guards.tensor_metadata import METADATA, TensorMetadata


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        return self.table(rows) + mask.to(dtype) * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*at capture:fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("recipe", ["schedule", "training"])
def test_what_the_forward_was_told_of_weights_holds_for_these_alone(how: Any, recipe: str) -> None:
    model, batch = Masked(), [torch.tensor([1, 3]), torch.tensor([[1], [0]])]
    graph = fxlib.capture(model, sample_inputs=batch, how=how)
    fast = fxlib.optimize(graph, recipe=recipe)
    for change in (model.double, model.bfloat16, fast.half, fast.float):
        change()
        for each in (graph, fast, copy.deepcopy(fast)):
            assert each(*batch).dtype is model.table.weight.dtype
            assert torch.equal(each(*batch), model(*batch))


def test_a_weight_cut_down_in_its_own_memory_is_another() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.parameters()).shape[0] + self.weight.sum()

    model, x = Counted(), torch.ones(2)
    graph = fxlib.capture(model)
    assert torch.equal(graph(x), model(x))
    model.weight.data = model.weight.data[:2]
    with pytest.warns(FxlibWarning, match="shape or strides of weight"):
        assert torch.equal(graph(x), model(x))


def test_an_export_is_for_weights_that_lie_as_they_did() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).exp()

    model, x = Flat(), torch.randn(1, 2, 3, 3)
    graph = fxlib.capture(model, sample_inputs=[x], how="export")
    model.layer.weight.data = model.layer.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.warns(FxlibWarning, match="strides of layer.weight are not what they were at capture"):
        assert torch.equal(graph(x), model(x))


def test_a_file_bound_to_a_model_holds_for_the_weights_it_was_bound_to(tmp_path: Path) -> None:
    model, batch = Masked(), [torch.tensor([1, 3]), torch.tensor([[1], [0]])]
    fxlib.save(fxlib.capture(model), tmp_path / "model.fxg")
    loaded = fxlib.load(tmp_path / "model.fxg", root=model)
    assert torch.equal(loaded(*batch), model(*batch))
    model.half()
    with pytest.warns(FxlibWarning, match="dtype"):
        assert loaded(*batch).dtype is torch.half


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3, 2))


class Logged(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def with_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Several], None]:
    def apply(model: Several) -> None:
        model.layers[1].weight.data = change(model.layers[1].weight.data)

    return apply


CHANGES: dict[str, tuple[Callable[[Several], object], bool]] = {
    "other values": (with_data(lambda x: x + 1.0), False),
    "dtype": (lambda model: model.double(), True),
    "shape": (with_data(lambda x: x[:2]), True),
    "strides": (with_data(lambda x: x.t()), True),
    "device": (lambda model: setattr(model.layers[1], "bias", nn.Parameter(torch.empty(3, device="meta"))), True),
    "layout": (lambda model: setattr(model, "mean", model.mean.to_sparse()), True),
    "gone": (lambda model: setattr(model.layers[1], "bias", None), True),
    "class": (lambda model: setattr(model.layers[1], "bias", Logged(torch.zeros(3))), True),
    "another one": (lambda model: setattr(model.layers[1], "bias", nn.Parameter(torch.ones(3))), False),
    "no gradient": (lambda model: model.layers[1].requires_grad_(False), False),
    "shared": (lambda model: setattr(model.layers[1], "weight", model.layers[0].weight), False),
    "apart": (lambda model: setattr(model.layers[2], "weight", nn.Parameter(torch.ones(3, 3))), False),
    "apart, of another shape": (lambda model: setattr(model.layers[2], "weight", nn.Parameter(torch.ones(2))), True),
}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("change, counts", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[Several], object], counts: bool, is_tied: bool) -> None:
    model = Several()
    if not is_tied:  # then torch compares them
        model.layers[2].weight = nn.Parameter(torch.zeros(3, 3))
    metadata = TensorMetadata(model, model, METADATA, strides=True)
    assert not metadata.changed()
    change(model)
    assert [bool(metadata.changed()) for _ in range(3)] == [counts] * 3


def test_a_weight_that_is_gone_is_the_one_that_is_named() -> None:
    model = Several()
    metadata = TensorMetadata(model, model, METADATA, strides=True)
    model.layers[1].bias = None
    assert "of layers.1.bias are not what they were" in metadata.changed()


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("later", [False, True])
def test_tensors_without_strides_are_compared_too(made: Callable[[], torch.Tensor], later: bool) -> None:
    model = Several()
    if not later:
        model.mean = made()
    metadata = TensorMetadata(model, model, METADATA, strides=True)
    assert [metadata.changed() for _ in range(3)] == ["", "", ""]
    if later:
        model.mean = made()
    else:
        model.double()
    assert metadata.changed()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_buffer_that_becomes_nested_raises_torch_s_error_and_ends_no_process() -> None:
    model = Several()
    metadata = TensorMetadata(model, model, METADATA, strides=True)
    assert not metadata.changed()
    model.mean = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="NestedTensorImpl"):
        metadata.changed()
