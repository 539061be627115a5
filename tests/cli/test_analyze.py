"""A saved graph, analyzed and drawn from a shell, without being executed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxlib as library
from tests.analysis.sketch import Sketch
from tests.cli.conftest import Run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "net.fxg"
    library.save(library.capture(nn.Sequential(nn.Linear(8, 4), nn.ReLU())), path)
    return str(path)


def test_totals_and_nodes(fxlib: Run, file: str) -> None:
    out = fxlib("analyze", file, "--input", "16x8", "--device", "h200").out
    assert "4 nodes, 1.02 kFLOP" in out
    assert "on NVIDIA H200 SXM" in out
    assert "float32[16, 4]" in out


def test_the_same_for_programs(fxlib: Run, file: str) -> None:
    told = json.loads(fxlib("analyze", file, "--input", "16x8:float32", "--json").out)
    assert told["flops"] == sum(each["flops"] for each in told["nodes"]) == 2 * 16 * 8 * 4
    assert told["seconds"] is None
    assert told["nodes"][1]["makes"] == ["float32[16, 4]"]


def test_a_picture(fxlib: Run, file: str, tmp_path: Path) -> None:
    path = tmp_path / "net.html"
    assert fxlib("draw", file, "--input", "16x8", "-o", str(path)).code == 0
    assert "float32[16, 4]" in path.read_text()


def test_what_missing_declarations_are_worth(fxlib: Run, tmp_path: Path) -> None:
    sketch = Sketch("x")
    x = sketch.inputs[0]
    module = sketch.returns(sketch.call("read", x), sketch.call("call", x, contract=None))
    path = str(tmp_path / "calls.fxg")
    library.save(module, path)

    (told,) = library.analyze(module, [torch.zeros(3)]).undeclared

    shown = fxlib("analyze", path, "--input", "3")
    assert "reads= would gain" in shown.out
    assert f"  {told}" in shown.out
    (listed,) = json.loads(fxlib("analyze", path, "--input", "3", "--json").out)["undeclared"]
    assert listed["functions"] == ["shop:call"]
    assert listed["gain"] == pytest.approx(told.gain)
    assert told.gain > 0.0


def test_this_processor(fxlib: Run, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(*, seconds: float) -> library.inspection.Device:
        return replace(library.inspection.load_device("h200"), source=f"in {seconds} s", asynchronous=False)

    monkeypatch.setattr(library.inspection, "calibrate", calibrate)
    path = str(tmp_path / "here.toml")
    told = json.loads(fxlib("calibrate", "-o", path, "--seconds", "0.5", "--json").out)
    assert (told["output"], told["asynchronous"], told["source"]) == (path, False, "in 0.5 s")
    assert "one forward on" in fxlib("analyze", file, "--input", "16x8", "--device", path).out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--input", "16x9"], "cannot run on such inputs"),
        ([], "does not say what its inputs are like"),
    ],
)
def test_what_is_wrong_is_one_line(fxlib: Run, file: str, arguments: list[str], message: str) -> None:
    ran = fxlib("analyze", file, *arguments)
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["analyze", "--device", "b9000"], "--device: b9000: no device has this name"),
        (["draw", "--output", "net.pdf"], "--output: net.pdf: nothing is drawn as '.pdf'. Name the file .html, .svg"),
        (["show", "--diff", "shedule"], "--diff: no recipe is called 'shedule'"),
    ],
)
def test_a_name_of_nothing_is_a_wrong_command_line(fxlib: Run, file: str, arguments: list[str], message: str) -> None:
    command, *rest = arguments
    ran = fxlib(command, file, *rest)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"fxlib: {message}")


@pytest.mark.parametrize("shape", ["16xmany", "16x8:Tensor", "16x8:quint8"])
def test_an_input_that_is_none_is_a_wrong_command_line(fxlib: Run, file: str, shape: str) -> None:
    ran = fxlib("analyze", file, "--input", shape)
    assert (ran.code, ran.out) == (2, "")
    assert f"{shape!r} is not a tensor" in ran.err
