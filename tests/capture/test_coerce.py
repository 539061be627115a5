"""Whatever holds a model is taken by all that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import symbolic_trace

import fxlib
from fxlib import Batch, Workload, wire
from fxlib.capture.coerce import as_graph
from fxlib.client.request import Question, captured_of, prepare
from fxlib.errors import CaptureError, FxlibError, FxlibWarning
from fxlib.runtime import CapturedModule

pytestmark = pytest.mark.slow


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class Decides(Straight):
    """Tracing refuses it."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        if x.shape[1] % 2:
            return x
        with torch.no_grad():
            scale = scale + 1
        return self.linear(x) * scale


ARGS, KWARGS = [torch.randn(8, 4)], {"scale": torch.full((4,), 2.0)}
BATCHES = [Batch(inputs=(torch.randn(size, 4),), kwargs=KWARGS) for size in (8, 3)]


def exported(model: nn.Module) -> ExportedProgram:
    sizes = {"x": {0: Dim("rows", min=2)}, "scale": None}
    return torch.export.export(model, tuple(ARGS), KWARGS, dynamic_shapes=sizes, strict=False)


FORMS = {
    "a module that traces": Straight,
    "a module that exports": Decides,
    "captured": lambda: fxlib.capture(Straight()),
    "a plain graph": lambda: symbolic_trace(Straight()),
    "an exported program": lambda: exported(Decides()),
}
each_form = pytest.mark.parametrize("made", FORMS.values(), ids=FORMS)


@each_form
def test_every_entry_takes_it(made: Any, tmp_path: Path) -> None:
    model = made()
    rewritten = fxlib.optimize(model, "training", workload=Workload(batches=BATCHES))
    assert fxlib.verify(model, rewritten, ARGS, kwargs=KWARGS)
    assert fxlib.bisect(model, "training", ARGS, kwargs=KWARGS) is None
    assert fxlib.analyze(model, {"x": ARGS[0], **KWARGS}).flops > 8 * 4 * 4
    fxlib.draw(model, tmp_path / "graph.dot", {"x": ARGS[0], **KWARGS})
    assert (tmp_path / "graph.dot").stat().st_size > 100
    fxlib.to_folder(model, tmp_path / "package", {"x": ARGS[0], **KWARGS})
    assert (tmp_path / "package" / "module.py").exists()
    assert fxlib.profile(model, BATCHES, steps=1).steps == 1
    workload = Workload.describe(BATCHES)
    assert prepare(captured_of(model, workload, Question()), workload, Question()).blobs


def test_an_exported_program_keeps_its_parameters_and_its_demands() -> None:
    model = Decides()
    graph = as_graph(exported(model))
    assert isinstance(graph, CapturedModule)
    assert type(graph).__name__ == "Decides"
    assert graph.linear.weight is model.linear.weight
    assert graph.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(5, 4)
    assert torch.equal(graph(x, **KWARGS), model(x, **KWARGS))
    with pytest.raises(CaptureError, match="exported for other inputs"):
        graph(torch.randn(5, 5), **KWARGS)
    sent = wire.encode(graph, weights=True)
    back = wire.decode(sent.graph, blobs=sent.blobs)
    assert torch.equal(back(x, **KWARGS), model(x, **KWARGS))


def _normed(*, train: bool, decomposed: bool) -> CapturedModule:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train(train)
    program = torch.export.export(model, (torch.randn(8, 4),))
    module = as_graph(program.run_decompositions() if decomposed else program)
    assert isinstance(module, CapturedModule)
    return module


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True])
@torch.no_grad()
def test_an_exported_program_is_in_the_mode_in_which_it_was_exported(decomposed: bool) -> None:
    module, x = _normed(train=False, decomposed=decomposed), torch.randn(8, 4)
    assert not module.eval().training
    for recipe in ("inference", "bfloat16"):
        assert torch.allclose(fxlib.optimize(module, recipe)(x), module(x), atol=0.1)
    with pytest.raises(FxlibError, match=r"exported in evaluation mode.*model\.train\(\)"):
        module.train()
    training = _normed(train=True, decomposed=decomposed)
    assert training.train().training
    with pytest.raises(FxlibError, match=r"exported in training mode.*model\.eval\(\)"):
        training.eval()
    with pytest.raises(FxlibError, match="eval mode"):
        fxlib.optimize(training, "inference")


class Drawn(nn.Module):
    """A dropout that is on in evaluation, too, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(x), 0.5, training=True)


BOTH = {
    "decides": lambda: exported(Decides()),
    "recurrent": lambda: torch.export.export(nn.GRU(4, 4), (torch.randn(2, 2, 4),)),
    "no dropout": lambda: torch.export.export(nn.Dropout(0.0), (torch.randn(2, 4),)),
    "a norm without statistics": lambda: torch.export.export(
        nn.InstanceNorm1d(4).eval(), (torch.randn(2, 4, 8),)
    ).run_decompositions(),
    "a dropout that is always on": lambda: torch.export.export(Drawn().eval(), (torch.randn(2, 4),)),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*assigned during export:UserWarning")
@pytest.mark.parametrize("program", BOTH.values(), ids=BOTH)
def test_an_exported_program_that_no_flag_tells_about_takes_either(program: Callable[[], Any]) -> None:
    graph = as_graph(program())
    assert not graph.training
    assert graph.train().training
    assert not graph.eval().training


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_flags_that_an_export_leaves_out_are_those_of_the_schema() -> None:
    program = torch.export.export(nn.RReLU().eval(), (torch.randn(2, 4),))
    assert not as_graph(program).eval().training


def test_an_exported_program_without_examples_is_taken_by_its_signature() -> None:
    program = exported(Decides())
    program._example_inputs = None
    assert torch.equal(as_graph(program)(*ARGS, **KWARGS), program.module()(*ARGS, **KWARGS))


def test_sizes_in_which_batches_differ_may_differ_in_runs(recwarn: pytest.WarningsRecorder) -> None:
    model = Decides()
    graph = as_graph(model, BATCHES)
    for size in (2, 5, 64):
        x = torch.randn(size, 4)
        assert torch.equal(graph(x, **KWARGS), model(x, **KWARGS))
    assert not [each for each in recwarn if issubclass(each.category, FxlibWarning)]


def test_what_holds_no_model_is_named() -> None:
    model: Any = "clicks"
    for entry in (as_graph, fxlib.optimize, lambda model: fxlib.verify(model, model, ARGS)):
        with pytest.raises(TypeError, match="a module or an exported program is wanted, not str"):
            entry(model)


def test_what_has_no_forward_is_refused_with_a_reason() -> None:
    class Trainer:
        def train(self) -> None: ...

    trainer: Any = Trainer()
    with pytest.raises(fxlib.errors.CaptureError, match="there is no module to optimize: a Trainer has no forward"):
        fxlib.capture(trainer)
