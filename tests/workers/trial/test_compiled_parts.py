"""Parts that a backend makes no faster stay as they are, and one that fails costs its own candidate alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxlib
from fxlib import TrialOptions, Workload, wire
from fxlib.errors import FxlibWarning
from fxlib.passes import Lower
from fxlib.reasons import Reason
from fxlib.recipes.recipes import Recipe
from fxlib.runtime import CapturedModule, backends
from fxlib.runtime.lowering import parts_of
from fxlib.utils.hardware import instructions
from fxlib_workers.trial.compiled_parts import leave_parts, time_parts, without_parts
from fxlib_workers.trial.driver import TrialDriver
from tests.workers.cases import candidate_of, request

pytestmark = pytest.mark.slow


class Uneven:
    """A compiler that is fast at sines, slow at cosines, and cannot do tangents."""

    name, package, keeps_weights = "inductor", "torch", False

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = {node.name for node in part.graph.nodes}  # type: ignore[union-attr]
        if "tan" in names:
            raise RuntimeError("no tangents")
        known = part(*inputs)

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            if "cos" in names:
                time.sleep(0.1)  # more than a busy machine keeps others waiting
                return tuple(part(*values))
            return known if not torch.is_grad_enabled() else tuple(part(*values))

        return run


class Three(nn.Module):
    """Three parts, between which nobody but torch draws."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        x = F.dropout(x.exp()).cos().sinh()
        return F.dropout(x.neg()).tan().tanh().neg()


@pytest.fixture(autouse=True)
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "inductor", Uneven())


def lowered(model: nn.Module | None = None) -> CapturedModule:
    graph = fxlib.capture(model or Three())
    found = Recipe(name="lowered", passes=(Lower(backend="inductor"),)).run(graph).module
    assert isinstance(found, CapturedModule)
    return found


def test_each_part_is_timed_beside_itself_and_the_graph_keeps_those_that_are_faster() -> None:
    x = torch.rand(300_000)
    with torch.no_grad():
        module = lowered()
        with pytest.warns(FxlibWarning, match="no tangents"):
            fast, slow, failed = parts = time_parts(module, lambda: module(x), limit_s=60.0)
    assert [each.compiled for each in parts] == [True, False, False]
    assert (fast.plain_s or 0.0) > (fast.compiled_s or 0.0) > 0.0
    assert fast.compile_s > 0.0
    assert "as it is" in slow.why
    assert "no tangents" in failed.why
    assert failed.plain_s is None
    left = without_parts(wire.serialize(wire.encode(module).graph), [slow, failed])
    ours = parts_of(wire.decode(wire.parse(left)).graph)
    assert [(part[0].name, len(part)) for part in ours] == [(fast.first, fast.nodes)]


def test_a_part_that_is_left_as_it_is_runs_so_at_once() -> None:
    called: list[object] = []
    with torch.no_grad():
        module = lowered()
        with pytest.warns(FxlibWarning, match="no tangents"):
            parts = time_parts(module, lambda: module(torch.rand(10)), limit_s=60.0)
        leave_parts(module, [parts[1].first])
        for part in module._fxlib.lowered.parts:
            part.watch = lambda *_: called.append(1)
        module(torch.rand(10))
    assert len(called) == 1


def test_where_gradients_are_recorded_a_part_is_timed_with_its_backward() -> None:
    module, x = lowered(), torch.rand(10, requires_grad=True)
    with pytest.warns(FxlibWarning, match="no tangents"):
        parts = time_parts(module, lambda: module(x), limit_s=60.0)
    assert [each.plain_s is not None for each in parts] == [True, True, False]
    assert x.grad is None


class Shared(nn.Module):
    """Two parts over one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(10))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.weight).exp().sin()
        return (F.dropout(x) * self.weight).exp().cos()


def test_a_backward_of_a_part_does_not_go_on_into_the_part_before_it() -> None:
    module, x = lowered(Shared()), torch.rand(10)
    parts = time_parts(module, lambda: module(x).sum().backward(), limit_s=60.0)
    assert [each.plain_s is not None for each in parts] == [True, True]


def test_a_compiler_that_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uneven, "compile", lambda *_: time.sleep(30.0))
    with torch.no_grad():
        module, x = lowered(), torch.rand(10)
        parts = time_parts(module, lambda: module(x), limit_s=1.5)
    assert [("compiling took more than 1.5 s" in each.why, each.compiled) for each in parts] == [(True, False)] * 3


class Slow(nn.Module):
    """Sines, which are worth compiling."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x.sin()
        return x


@pytest.mark.cluster
def test_a_compiler_that_crashes_hangs_or_returns_other_shapes_costs_its_candidate_alone(
    trials: TrialDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrialOptions(budget_s=15, step_timeout_s=3)
    with torch.no_grad():
        captured = fxlib.capture(Slow().eval())
    workload = Workload.describe([torch.rand(100_000)], mode="forward")
    folder, candidates = request(tmp_path / "job", captured, workload, options), []
    for name in ("openvino", "onnxruntime", "inductor", "inductor_freezing"):
        monkeypatch.setitem(backends.BACKENDS, name, Uneven())
        monkeypatch.setattr(backends.BACKENDS[name], "name", name, raising=False)
        done = Recipe(name=name, passes=(Lower(backend=name),)).run(captured)
        candidates.append(candidate_of(name, done.module, passes=done.passes, preserves="tolerance"))
    folder.write_rewrite(candidates[0].report, candidates)
    report = trials.run(folder, lambda *_: None, lambda: None)  # whose processes have the backends of `bad_backends`
    assert (report.decision, report.reason) == ("adopt", Reason.FASTER), report.explanation
    crashes, hangs, reshapes, good = (each.verdict for each in report.candidates)
    assert "a process of the trial died: trainer 'trainer0' ended: Segmentation fault (signal 11)" in crashes
    assert "time_parts of 'onnxruntime' took more than" in hangs
    assert "inductor==" in reshapes
    assert "returned a result of another form than (100000,)" in reshapes
    assert Reason.FASTER.sentence() in good
    assert report.instructions == instructions()
