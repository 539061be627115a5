"""Click logs are read as the format says, and refused by file and line where they are not in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from examples.dlrm import data

DENSE, SPARSE = [""] * 13, [""] * 26


def line(*, label: str = "1", dense: list[str] = DENSE, sparse: list[str] = SPARSE) -> str:
    return "\t".join([label, *dense, *sparse]) + "\n"


def test_integers_become_logarithms_and_categories_rows() -> None:
    text = line(dense=["3", "-2", *DENSE[2:]], sparse=["0000000a", *SPARSE[1:]])
    label, dense, sparse = data.parse(text, rows=7, where="here")
    assert label == 1.0
    assert dense[:3] == [pytest.approx(math.log(4)), 0.0, 0.0]
    assert sparse[:2] == [10 % 7, 0]


@pytest.mark.parametrize(
    "text", ["1\t2\n", line(label="x"), line(dense=["x", *DENSE[1:]]), line(sparse=["xyz", *SPARSE[1:]])]
)
def test_a_line_that_is_not_in_the_format_is_named(tmp_path: Path, text: str) -> None:
    logs = tmp_path / "clicks.tsv"
    logs.write_text(line() + text)
    with pytest.raises(ValueError, match=r"clicks\.tsv:2: "):
        list(data.read(logs, batch=1, rows=10))


def test_generated_logs_are_read_back_in_whole_batches(tmp_path: Path) -> None:
    logs = tmp_path / "clicks.tsv"
    data.generate(logs, samples=25)
    batches = list(data.read(logs, batch=10, rows=100))
    assert len(batches) == 2
    for dense, sparse, labels in batches:
        assert (dense.shape, sparse.shape, labels.shape) == ((10, 13), (10, 26), (10,))
        assert int(sparse.min()) >= 0
        assert int(sparse.max()) < 100
        assert set(labels.tolist()) <= {0.0, 1.0}


def test_a_seed_writes_the_same_logs_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        data.generate(tmp_path / name, samples=5, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert torch.equal(*(next(data.read(tmp_path / name, batch=5, rows=9))[1] for name in ("a", "b")))
