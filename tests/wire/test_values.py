"""Values of a graph: those computed from weights, what travels and what the reader makes of it; numbers of NumPy."""

from __future__ import annotations

import enum
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib import wire
from fxlib.errors import FxlibWarning, WireError
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.folded_weights import marks_of

INFERENCE = "inference"


class Net(nn.Module):
    """A norm to fold, and a constant that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.linear(x))
        return normed * (self.scale * 2)


@pytest.fixture
def captured() -> CapturedModule:
    return fxlib.capture(Net())


def rewritten(captured: CapturedModule) -> wire.Encoded:
    """What a worker makes of the graph and the weights that it was sent."""
    sent = wire.encode(captured, weights=True)
    theirs = wire.decode(sent.graph, blobs=sent.blobs)
    return wire.encode(recipes.apply(theirs, INFERENCE).module, beside=theirs)


@torch.no_grad()
def test_only_what_was_computed_comes_back_and_it_does_what_the_model_does(captured: CapturedModule) -> None:
    answer = rewritten(captured)
    assert len(answer.blobs) == 3
    module = wire.decode(answer.graph, blobs=answer.blobs, root=captured)
    x = torch.randn(2, 4)
    assert torch.allclose(module(x), captured(x), atol=1e-6)
    assert "norm" not in {str(node.target) for node in module.graph.nodes}
    assert module.state_dict().keys() == captured.state_dict().keys()
    assert module.linear.weight is captured.linear.weight


@torch.no_grad()
@pytest.mark.parametrize("change", ["linear.weight", "norm.running_var", "scale"])
def test_the_model_itself_runs_once_weights_have_changed(captured: CapturedModule, change: str) -> None:
    answer = rewritten(captured)
    module = wire.decode(answer.graph, blobs=answer.blobs, root=captured)
    path, _, name = change.rpartition(".")
    getattr(captured.get_submodule(path), name).mul_(2)
    x = torch.randn(2, 4)
    with pytest.warns(FxlibWarning, match="have changed: optimize the model again"):
        assert torch.equal(module(x), captured(x))


@torch.no_grad()
def test_what_is_written_between_sending_and_binding_shows(captured: CapturedModule) -> None:
    marks, answer = marks_of(captured), rewritten(captured)
    captured.scale.mul_(2)
    module = wire.decode(answer.graph, blobs=answer.blobs, root=captured)
    module.computed_from(marks)
    x = torch.randn(2, 4)
    with pytest.warns(FxlibWarning, match="have changed: optimize the model again"):
        assert torch.equal(module(x), captured(x))


def test_a_value_that_did_not_come_is_missed(captured: CapturedModule) -> None:
    answer = rewritten(captured)
    with pytest.raises(WireError, match="is missing"):
        wire.decode(answer.graph, root=captured)


def test_values_of_a_graph_are_named_once_and_by_their_digests(captured: CapturedModule) -> None:
    answer = rewritten(captured)
    named = wire.values_of(answer.graph)
    assert [hashlib.sha256(answer.blobs[ref.sha256]).hexdigest() for ref in named] == [ref.sha256 for ref in named]
    assert wire.values_of(wire.encode(captured).graph) == []


def test_weights_behind_a_node_that_computes_are_refused(captured: CapturedModule) -> None:
    graph = rewritten(captured).graph
    call = next(node for node in graph.modules[-1].graph.nodes if node.args)
    call.folded.append("linear.weight")
    with pytest.raises(WireError, match=r"folded.*only a value that the module holds"):
        wire.validate(graph)


@pytest.mark.parametrize("name", ["", "a b", "linear..weight", "__class__.x", "linear.absent"])
def test_weights_of_other_names_are_refused(captured: CapturedModule, name: str) -> None:
    answer = rewritten(captured)
    held = next(node for node in answer.graph.modules[-1].graph.nodes if node.folded)
    held.folded.append(name)
    with pytest.raises(WireError, match=r"folded|no such tensor"):
        wire.decode(answer.graph, blobs=answer.blobs, root=captured)


class Axis(enum.IntEnum):
    ROWS = 0
    COLUMNS = 1


class Sized(nn.Module):
    """As configurations read from files and data frames size their layers."""

    scale: Any
    most: Any

    def __init__(self) -> None:
        super().__init__()
        numbers: Any = np
        self.rows = nn.EmbeddingBag(numbers.int64(10), 4, mode="sum")
        self.top = nn.Linear(numbers.int32(4), numbers.int64(3))
        self.norm = nn.LayerNorm(numbers.int64(3), eps=numbers.float64(1e-5))
        self.drop = nn.Dropout(numbers.float32(0.0))
        self.scale, self.most = np.float32(0.1), np.int64(2)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.drop(self.norm(self.top(self.rows(rows)))) * self.scale + np.float64(2)
        found: Tensor = x.clamp(max=self.most).sum(dim=Axis.COLUMNS, keepdim=True)
        return found


def test_modules_and_arguments_with_numbers_of_numpy_are_captured_sent_and_run_alone() -> None:
    model, rows = Sized(), torch.randint(10, (5, 3))
    captured = fxlib.capture(model)
    assert torch.equal(captured(rows), model(rows))
    encoded = wire.encode(captured, weights=True)
    assert not [module.opaque for module in encoded.graph.modules if module.WhichOneof("kind") == "opaque"]
    alone = wire.decode(wire.parse(wire.serialize(encoded.graph)), blobs=encoded.blobs)
    assert torch.equal(alone(rows), model(rows))
    assert type(vars(alone.get_submodule("rows"))["num_embeddings"]) is int


@pytest.mark.slow
def test_an_export_takes_them_too() -> None:
    model, rows = Sized(), torch.randint(10, (5, 3))
    captured = fxlib.capture(model, sample_inputs=[rows], how="export")
    assert torch.equal(captured(rows), model(rows))
    assert torch.equal(wire.decode(wire.encode(captured).graph, root=captured)(rows), model(rows))
