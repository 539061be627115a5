"""A module as a file: whole or absent, and refused when it is not one of ours."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import fxlib
from fxlib import wire
from fxlib.errors import LimitError, WireError
from fxlib.serialization import files


@pytest.fixture
def module() -> GraphModule:
    return symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).eval()


@pytest.fixture
def path(module: GraphModule, tmp_path: Path) -> Path:
    fxlib.save(module, tmp_path / "model.fxg")
    return tmp_path / "model.fxg"


def test_a_module_comes_back_from_its_file_with_its_weights(module: GraphModule, path: Path) -> None:
    loaded = fxlib.load(path)
    x = torch.randn(5, 3)
    assert torch.equal(loaded(x), module(x))
    assert wire.digest(wire.encode(loaded).graph) == wire.digest(wire.encode(module).graph)


def test_equal_modules_give_equal_files(module: GraphModule, path: Path, tmp_path: Path) -> None:
    fxlib.save(fxlib.load(path), tmp_path / "again.fxg")
    assert (tmp_path / "again.fxg").read_bytes() == path.read_bytes()


def test_a_file_can_hold_the_structure_alone(module: GraphModule, tmp_path: Path) -> None:
    fxlib.save(module, tmp_path / "bare.fxg", weights=False)
    bound = fxlib.load(tmp_path / "bare.fxg", root=module)
    assert next(bound.parameters()) is next(module.parameters())


def test_no_file_is_left_when_saving_fails(module: GraphModule, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        fxlib.save(module, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_has_the_permissions_of_any_other(path: Path) -> None:
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("length", [0, 5, 15, 16, 40, 48, 80, -1])
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(WireError):
        fxlib.load(path)


@pytest.mark.parametrize(
    "content", [pickle.dumps({}), b"PK\x03\x04" + b"\0" * 40, files.MARK + b"\xff" * 8, b"\0" * 99]
)
def test_a_file_of_another_kind_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WireError):
        fxlib.load(path)


def test_more_bytes_than_the_graph_accounts_for_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(WireError, match="more bytes"):
        fxlib.load(path)


def test_a_changed_weight_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WireError, match="digest"):
        fxlib.load(path)


@pytest.mark.parametrize("place", [20, 60, 200, 400])
def test_a_changed_bit_of_the_graph_is_refused_by_the_name_of_the_file(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)
    with pytest.raises(WireError, match=f"{path.name}: .*does not match its digest: the file is damaged"):
        fxlib.load(path)


def test_limits_hold_for_files(path: Path) -> None:
    with pytest.raises(LimitError, match="exceeds the limit"):
        fxlib.load(path, limits=wire.Limits(graph_bytes=10))
    with pytest.raises(LimitError, match="weights_bytes"):
        fxlib.load(path, limits=wire.Limits(weights_bytes=10))
