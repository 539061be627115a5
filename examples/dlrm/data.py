"""Click logs in the format of the Criteo data sets: a sample a line, label, 13 integers, 26 categories, tabs between.

Format: https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset/ (categories are 32-bit hashes in hexadecimal;
any feature may be empty).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from examples.dlrm.model import DENSE_FEATURES, SPARSE_FEATURES

Sample = tuple[float, list[float], list[int]]


def read(path: Path, *, batch: int, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield dense features [batch, 13] as log(1 + x), rows of the tables [batch, 26], and labels [batch].

    A categorical value is hashed to a row by its remainder; an empty one takes row 0. A last, smaller batch is dropped.

    Raises:
        ValueError: a line is not in the format; names file and line.
    """
    with path.open() as file:
        samples = (parse(line, rows=rows, where=f"{path}:{number}") for number, line in enumerate(file, start=1))
        while len(chunk := list(islice(samples, batch))) == batch:
            labels, dense, sparse = zip(*chunk, strict=True)
            yield torch.tensor(dense), torch.tensor(sparse), torch.tensor(labels)


def parse(line: str, *, rows: int, where: str) -> Sample:
    """Return label, dense features and table rows of one line.

    Raises:
        ValueError: the line is not in the format.
    """
    fields = line.rstrip("\n").split("\t")
    if len(fields) != 1 + DENSE_FEATURES + SPARSE_FEATURES:
        raise ValueError(f"{where}: {len(fields)} fields, and a sample has {1 + DENSE_FEATURES + SPARSE_FEATURES}")
    try:
        dense = [math.log1p(max(int(value or 0), 0)) for value in fields[1 : 1 + DENSE_FEATURES]]
        sparse = [int(value or "0", 16) % rows for value in fields[1 + DENSE_FEATURES :]]
        return float(fields[0]), dense, sparse
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def generate(path: Path, *, samples: int, seed: int = 0) -> None:
    """Write so many made-up samples: skewed categories, and clicks that depend on them, so that a model can learn."""
    dice = random.Random(seed)
    taste = [[dice.gauss(0, 1) for _ in range(64)] for _ in range(SPARSE_FEATURES)]
    with path.open("w") as file:
        for _ in range(samples):
            counts = [int(math.log(1 - dice.random()) / math.log(0.8)) for _ in range(DENSE_FEATURES)]  # geometric
            values = [min(int(dice.paretovariate(0.3)), 2**32 - 1) for _ in range(SPARSE_FEATURES)]
            score = sum(taste[i][value % 64] for i, value in enumerate(values)) / 3 + 0.1 * (counts[0] - 4)
            clicked = int(dice.random() < 1 / (1 + math.exp(-score)))
            dense = ["" if dice.random() < 0.05 else str(count) for count in counts]
            sparse = ["" if dice.random() < 0.02 else f"{value:08x}" for value in values]
            file.write("\t".join([str(clicked), *dense, *sparse]) + "\n")
