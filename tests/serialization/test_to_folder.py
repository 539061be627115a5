"""A captured module as a package that runs without fxlib."""

from __future__ import annotations

import errno
import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path as Path_
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.fx import Graph, GraphModule

import fxlib
from fxlib.errors import WireError
from fxlib.serialization import files
from tests.client.models import Clicks
from tests.shared.forked import printed

PROGRAM = """
import importlib, pathlib, sys
sys.modules["fxlib"] = None  # importing it fails
import torch
from safetensors.torch import load_file, save_file
for package in sys.argv[1:]:
    name = pathlib.Path(package).name
    made = importlib.import_module(name)
    module = getattr(made, made.__all__[0])()
    x = load_file(f"{name}.in")["x"].clone()  # aligned as it was
    output = module(x)
    output.square().mean().backward()
    grads = {key: value.grad.contiguous() for key, value in module.named_parameters() if value.grad is not None}
    save_file({"y": output.detach().contiguous(), **grads}, f"{name}.out")
    if name in ("ranked", "exported"):
        try:
            module(torch.ones(1, 5, 4))
        except ValueError as error:
            print(name, error)
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(4, 6, bias=False), nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Sequential(nn.Linear(4, 6, bias=False), nn.GELU())
        self.out[0].weight = self.embed.weight
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rnn(self.embed(x))[0]
        y = self.attention(y, y, y)[0]
        return self.out(x * self.scale) + y


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False))
        for name, weight in self.named_parameters():
            if weight.dim() == 4:
                self.get_parameter(name).data = weight.data.to(memory_format=torch.channels_last)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.shape[0] > 1 else x


@pytest.mark.slow
def test_packages_run_without_fxlib_and_give_the_same(tmp_path: Path_) -> None:
    torch.manual_seed(0)
    image, rows = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 4)
    convolutions = fxlib.capture(Convolutions().eval())
    ranked = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    modules = {
        "tied": (fxlib.capture(Tied().eval()), rows),
        "plain": (convolutions, image),
        "folded": (fxlib.optimize(convolutions, "inference"), image),
        "ranked": (fxlib.optimize(fxlib.capture(ranked), "inference"), rows[0]),
        "exported": (fxlib.capture(Branches().eval(), sample_inputs=(rows,)), rows),
    }
    for name, (module, x) in modules.items():
        fxlib.to_folder(module, tmp_path / name)
        save_file({"x": x}, tmp_path / f"{name}.in")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules], check=False, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    for name, (module, x) in modules.items():
        found = load_file(tmp_path / f"{name}.out")
        folded = name in ("folded", "ranked")
        with torch.set_grad_enabled(not folded):
            assert torch.equal(found.pop("y"), module(x)), name
        if not folded:
            module.zero_grad()
            module(x).square().mean().backward()
            for key, gradient in found.items():
                expected = module.get_parameter(key).grad
                assert expected is not None
                assert torch.equal(gradient, expected), (name, key)
    assert "ranked Sequential: the argument input is not a tensor of 2 dimensions" in ran.stdout
    assert "exported Branches: the argument x has the shape (1, 5, 4), and the graph is for (2, 5, 4)" in ran.stdout
    assert not list(tmp_path.glob("**/*.p*kl*"))


class Path(nn.Module):
    """Has the name of something that packages use, and tensors that safetensors cannot hold as they are."""

    turn: torch.Tensor
    mirror: torch.Tensor
    wide: torch.Tensor
    every: torch.Tensor
    small: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        for name, value in {
            "turn": torch.randn(4, dtype=torch.complex128),
            "mirror": torch.randn(4, dtype=torch.complex64).conj(),
            "wide": torch.randn(4).expand(5, 4),
            "every": torch.randn(8)[::2],
            "small": torch.randn(4).to(torch.float8_e4m3fn),
            "count": torch.tensor([1, 2, 3, 4], dtype=torch.uint16),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * self.turn.real.float() + self.mirror.imag + self.wide + self.every
        return x + self.small.float() * self.count.float()


@pytest.mark.slow
def test_names_and_tensors_of_any_kind_make_a_package(tmp_path: Path_) -> None:
    model, x = Path(), torch.randn(2, 5, 4)
    fxlib.to_folder(fxlib.capture(model), tmp_path / "odd")
    fxlib.to_folder(fxlib.capture(lambda x: x.sin()), tmp_path / "nameless")
    for name in ("odd", "nameless"):
        save_file({"x": x}, tmp_path / f"{name}.in")
    program = PROGRAM.replace("output.square().mean().backward()", "")
    ran = subprocess.run(
        [sys.executable, "-c", program, "odd", "nameless"], check=False, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert torch.equal(load_file(tmp_path / "odd.out")["y"], model(x))
    assert torch.equal(load_file(tmp_path / "nameless.out")["y"], x.sin())


def called(name: str, base: type[nn.Module]) -> nn.Module:
    kind: type[nn.Module] = type(name, (base,), {})
    return kind()


@pytest.mark.slow
@pytest.mark.parametrize("base", [nn.Tanh, Clicks])
def test_a_class_may_be_called_as_something_in_the_package_is(
    tmp_path: Path_, base: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def package(name: str) -> ModuleType:
        folder = tmp_path / f"{base.__name__}_{name}"
        fxlib.to_folder(fxlib.capture(called(name, base)), folder)
        return importlib.import_module(folder.name)

    monkeypatch.syspath_prepend(tmp_path)
    plain = package("Plain")
    code = plain if base is Clicks else importlib.import_module(f"{plain.__name__}.module")
    names = {name for name in vars(code) if not name.startswith("__")} - {"Plain"}
    assert names & {"Path", "_PARTS"}
    for name in names:
        made = package(name)
        assert made.__all__ == [f"{name}_"]
        assert isinstance(getattr(made, f"{name}_")(), nn.Module)


class Tracks(nn.Module):
    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.randn(4, dtype=torch.complex64, requires_grad=True))
        self.scale = torch.randn(4, 4).t().requires_grad_()

    def forward(self, x: torch.Tensor, most: float = 0.0) -> torch.Tensor:
        return (x * self.turn.real) @ self.scale if x.shape[0] > 1 else x.clamp(max=most)


@pytest.mark.slow
def test_tensors_take_gradients_and_numbers_are_pythons_in_a_package(tmp_path: Path_) -> None:
    inputs = (torch.ones(2, 4), float("inf"))
    float_32: Any = np.float32(0.5)
    fxlib.to_folder(Tracks(), tmp_path / "tracks", inputs)
    fxlib.to_folder(nn.Sequential(nn.Dropout(np.float64(0.25)), nn.ELU(float_32)), tmp_path / "numpys")
    program = (
        "import tracks, torch; module = tracks.Tracks(); module(torch.ones(2, 4), float('inf')).sum().backward();"
        "print(module.turn.grad.shape, module.scale.grad.stride());"
        "import numpys; print(numpys.Sequential())"
    )
    shown = printed(program, tmp_path)
    assert shown.startswith("torch.Size([4]) (1, 4)\n")
    assert "Dropout(p=0.25, inplace=False)" in shown
    assert "ELU(alpha=0.5)" in shown


@pytest.mark.slow
def test_packages_of_runtime_operators_and_int8_layers_need_fxlib_and_say_so_and_compute_the_same(
    tmp_path: Path_,
) -> None:
    module = fxlib.optimize(fxlib.capture(nn.Sequential(nn.Linear(64, 64)).eval()), recipe="int8")
    fxlib.to_folder(fxlib.optimize(fxlib.capture(Clicks())), tmp_path / "clicks")
    fxlib.to_folder(module, tmp_path / "levels")
    assert "so it needs fxlib" in (tmp_path / "clicks" / "__init__.py").read_text()
    assert "fxlib.int8_linear.default" in (tmp_path / "levels" / "__init__.py").read_text()
    x = torch.randn(3, 64)
    save_file({"x": x}, tmp_path / "x")
    program = (
        "import levels, torch; from safetensors.torch import load_file, save_file; torch.set_grad_enabled(False);"
        "save_file({'y': levels.Sequential()(load_file('x')['x'])}, 'y');"
        "import clicks; module = clicks.Clicks(); print(type(module).__name__, len(module.graph.nodes) > 3)"
    )
    assert printed(program, tmp_path).split() == ["Clicks", "True"]
    with torch.no_grad():
        assert torch.equal(load_file(tmp_path / "y")["y"], module(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_no_package_can_hold_is_named(tmp_path: Path_) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    graph = fxlib.capture(model)
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(WireError, match="module '0': a package cannot hold it: it carries hooks"):
        fxlib.to_folder(graph, tmp_path / "hooked")
    assert not (tmp_path / "hooked").exists()
    quantized = nn.Module()
    quantized.register_buffer("rows", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    graph_of_it = Graph()
    graph_of_it.output(graph_of_it.get_attr("rows"))
    with pytest.raises(WireError, match="tensor 'rows': a package cannot hold a Tensor"):
        fxlib.to_folder(GraphModule(quantized, graph_of_it), tmp_path / "quantized")
    freed = fxlib.capture(nn.Sequential(nn.Linear(2, 2)))
    freed.get_parameter("0.weight").untyped_storage().resize_(0)
    with pytest.raises(WireError, match=r"tensor '0\.weight': its memory was freed"):
        fxlib.to_folder(freed, tmp_path / "freed")


def test_a_package_of_which_not_all_is_written_is_none(tmp_path: Path_, monkeypatch: pytest.MonkeyPatch) -> None:
    written, whole = list[str](), files.write_whole
    folder = tmp_path / "half_a_package"

    def full_at(name: str) -> None:
        def write(target: Path_, parts: Iterable[bytes]) -> None:
            if target.name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(target.name)
            whole(target, parts)

        monkeypatch.setattr(files, "write_whole", write)

    def model(weight: float) -> nn.Module:
        made = nn.Linear(1, 1, bias=False)
        nn.init.constant_(made.weight, weight)
        return made

    full_at("")
    fxlib.to_folder(model(1.0), folder)
    assert written[-1] == "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)
    for name in tuple(written):
        full_at(name)
        with pytest.raises(OSError, match="No space"):
            fxlib.to_folder(model(2.0), folder)
        with pytest.raises(AttributeError):
            _ = importlib.import_module(folder.name).Linear
        del sys.modules[folder.name]
    full_at("")
    fxlib.to_folder(model(2.0), folder)
    importlib.invalidate_caches()
    assert importlib.import_module(folder.name).Linear().weight.item() == 2.0


def test_a_package_stays_if_no_other_can_be_made_of_the_module(tmp_path: Path_) -> None:
    fxlib.to_folder(nn.Linear(1, 1), tmp_path / "kept")
    before = {each.name: each.read_bytes() for each in (tmp_path / "kept").iterdir()}
    hooked = nn.Sequential(nn.Linear(2, 2))
    graph = fxlib.capture(hooked)
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(WireError):
        fxlib.to_folder(graph, tmp_path / "kept")
    assert {each.name: each.read_bytes() for each in (tmp_path / "kept").iterdir()} == before


class Sides(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class GivesSides(nn.Module):
    def forward(self, x: torch.Tensor) -> Sides:
        return Sides(x, x * 2 if x.shape[0] > 1 else x)


@pytest.mark.slow
def test_a_result_whose_class_cannot_be_written_is_named(tmp_path: Path_) -> None:
    with pytest.raises(WireError, match="a package cannot hold how it is nested"):
        fxlib.to_folder(fxlib.capture(GivesSides(), sample_inputs=[torch.ones(2)]), tmp_path / "sides")
