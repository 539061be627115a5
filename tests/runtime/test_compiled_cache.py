"""What a backend made of a part serves later processes, for the same part alone, from a folder of this user's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxlib.config import CACHE
from fxlib.runtime import compiled_cache
from fxlib.runtime.compiled_cache import Run, through_cache

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.activation = nn.Linear(4, 4), nn.LeakyReLU(slope)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.activation(self.layer(x)) + self.shift,)


class Compiler:
    """Remembers how often it compiled, and writes the number that it multiplies results with down."""

    def __init__(self, part: GraphModule, factor: str = "1.0") -> None:
        self.part, self.factor, self.compiled = part, factor, 0

    def _read(self, kept: bytes) -> Run:
        factor = float(kept)
        return lambda *values: tuple(each * factor for each in self.part(*values))

    def _make(self) -> tuple[Run, Callable[[], bytes]]:
        self.compiled += 1
        return self.part, self.factor.encode

    def run(self, x: torch.Tensor = X, backend: str = "some==1") -> int:
        """Have it compile unless that was done before, and return how often it has compiled by now."""
        with torch.no_grad():
            found = through_cache(backend, self.part, (x,), read=self._read, make=self._make)
            assert torch.equal(found(x)[0], self.part(x)[0])
        return self.compiled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def part(slope: float = 0.1) -> GraphModule:
    return symbolic_trace(Net(slope).eval())


def test_a_part_is_compiled_once_for_all_processes(folder: Path) -> None:
    assert [Compiler(part()).run() for _ in range(3)] == [1, 0, 0]
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)


def weight(made: GraphModule) -> None:
    made.get_parameter("layer.weight")[0, 0] += 1e-3


def attribute(made: GraphModule) -> None:
    made.get_parameter("shift")[0] += 1e-3


@pytest.mark.parametrize("change", [weight, attribute])
@torch.no_grad()
def test_other_weights_are_another_part(folder: Path, change: Callable[[GraphModule], None]) -> None:
    Compiler(part()).run()
    other = copy.deepcopy(part())
    change(other)
    assert Compiler(other).run() == 1
    assert len(list(folder.iterdir())) == 2


@pytest.mark.usefixtures("folder")
def test_another_option_shape_version_or_number_of_threads_is_another_part() -> None:
    Compiler(part()).run()
    assert Compiler(part(0.2)).run() == 1
    assert Compiler(part()).run(X[:2]) == 1
    assert Compiler(part()).run(backend="some==2") == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert Compiler(part()).run() == 1
    finally:
        torch.set_num_threads(threads)
    assert Compiler(part()).run() == 0


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"1.5"])
def test_what_is_damaged_or_computes_something_else_is_made_anew(folder: Path, damage: bytes) -> None:
    Compiler(part()).run()
    (kept,) = folder.iterdir()
    kept.write_bytes(damage)
    assert Compiler(part()).run() == 1
    assert Compiler(part()).run() == 0


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_may_look_into_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    assert [Compiler(part()).run() for _ in range(2)] == [1, 1]
    assert list(folder.iterdir()) == []


def test_a_link_is_no_folder_of_ones_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "other")
    assert [Compiler(part()).run() for _ in range(2)] == [1, 1]


def test_without_a_folder_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    assert [Compiler(part()).run() for _ in range(2)] == [1, 1]
    assert not folder.exists()


def test_what_was_used_longest_ago_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_cache, "MOST_BYTES", 10)
    for index, key in enumerate(("a", "b")):
        compiled_cache.keep(key, b"12345")
        (folder / key).touch()
        os.utime(folder / key, (index, index))
    assert compiled_cache.load("a") == b"12345"
    compiled_cache.keep("c", b"123")
    assert sorted(each.name for each in folder.iterdir()) == ["a", "c"]
    compiled_cache.keep("d", b"12345678901")
    assert compiled_cache.load("d") is None
