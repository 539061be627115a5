"""Architectures that nobody here wrote are captured, sent, and rewritten, and stay the programs that they were."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fxlib
from fxlib import wire
from fxlib.errors import FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.utils import pytree
from tests.models import zoo

# One of each kin: what is left out has the layers of one that is here, as RoBERTa those of BERT, and Mistral of LLaMA.
# wav2vec2 draws which layers to skip: a decision by a value, which no graph can hold.
_TRAINED = ["resnet20_cifar10", "densenet40_k12_cifar10", "bert", "gpt2", "gpt_neox", "opt", "llama", "t5", "bart"]
_TRAINED += ["whisper_encoder", "vit", "convnext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A model and its capture, of which several tests speak."""

    name: str
    model: torch.nn.Module
    inputs: zoo.Inputs
    graph: CapturedModule


@pytest.fixture(scope="module")
def captured(request: pytest.FixtureRequest) -> Captured:
    model, inputs = zoo.build(request.param, small=True)
    return Captured(name=request.param, model=model, inputs=inputs, graph=fxlib.capture(model, sample_inputs=inputs))


def _outputs(module: torch.nn.Module, inputs: zoo.Inputs) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [leaf for _, leaf in pytree.leaves(module(*inputs)) if isinstance(leaf, torch.Tensor)]


def _assert_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("captured", zoo.models(), indirect=True)
def test_a_model_comes_in_whole(captured: Captured) -> None:
    model, graph = captured.model, captured.graph
    _assert_has_state_of(model, graph)
    same = fxlib.verify(model, graph, captured.inputs)
    assert same, same
    _assert_travels(graph, captured.inputs)
    scheduled = fxlib.optimize(graph, recipe="schedule")
    _assert_has_state_of(model, scheduled)
    if scheduled.code != graph.code:  # there are no calls to move, but a node may run nearer to what uses it
        same = fxlib.verify(model, scheduled, captured.inputs, grad=False)
        assert same, same


def _assert_has_state_of(model: torch.nn.Module, graph: torch.nn.Module) -> None:
    assert [id(each) for each in graph.parameters()] == [id(each) for each in model.parameters()]
    assert [id(each) for each in graph.buffers()] == [id(each) for each in model.buffers()]
    assert graph.state_dict().keys() == model.state_dict().keys()


def _assert_travels(captured: CapturedModule, inputs: zoo.Inputs) -> None:
    encoded = wire.encode(captured, weights=True)
    graph = wire.parse(wire.serialize(encoded.graph))
    there = wire.decode(graph, blobs=encoded.blobs)
    expected = _outputs(captured, inputs)
    _assert_alike(_outputs(there, inputs), expected)
    _assert_alike(_outputs(wire.decode(graph, root=captured), inputs), expected)
    assert wire.serialize(wire.encode(there, weights=True).graph) == wire.serialize(encoded.graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", _TRAINED)
def test_a_model_in_training_draws_and_counts_as_it_did(name: str) -> None:
    model, inputs = zoo.build(name, training=True, small=True)
    same = fxlib.verify(model, fxlib.capture(model, sample_inputs=inputs), inputs)
    assert same, same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20_cifar10", "shufflenet_g1_wd4"])
def test_a_convolutional_network_can_be_exported_too(name: str) -> None:
    model, inputs = zoo.build(name, small=True)
    captured = fxlib.capture(model, sample_inputs=inputs, how="export")
    same = fxlib.verify(model, captured, inputs)
    assert same, same
    _assert_travels(captured, inputs)


@pytest.mark.slow
def test_a_language_model_takes_texts_of_any_declared_length() -> None:
    model, (tokens,) = zoo.build("gpt2")
    sizes = ({0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", max=32)},)
    captured = fxlib.capture(model, sample_inputs=[tokens], dynamic_shapes=sizes)
    there = wire.decode(wire.encode(captured).graph, root=captured)
    for shape in ((2, 5), (3, 17)):
        texts = (torch.randint(0, 64, shape),)
        assert fxlib.verify(model, captured, texts)
        assert fxlib.verify(model, there, texts)
    with pytest.warns(FxlibWarning, match=r"the graph holds where \w+ is 2 to 8"):
        captured(torch.randint(0, 64, (9, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("captured", ["gpt2", "llama", "t5"], indirect=True)
def test_a_language_model_answers_in_its_own_class_with_a_cache_that_decodes_on(captured: Captured) -> None:
    model, name = captured.model, captured.name
    with torch.no_grad():
        ours, theirs = captured.graph(*captured.inputs), model(*captured.inputs)
        assert type(ours) is type(theirs)
        assert type(ours.past_key_values) is type(theirs.past_key_values)
        token = {"decoder_input_ids" if name == "t5" else "input_ids": torch.full((2, 1), 5)}
        given = {"encoder_outputs": (theirs.encoder_last_hidden_state,)} if name == "t5" else {}
        one, other = (model(**token, **given, past_key_values=each.past_key_values) for each in (ours, theirs))
    assert all(torch.equal(*pair) for pair in zip(one.to_tuple()[:1], other.to_tuple()[:1], strict=True))
