"""Weights that are the same in every run."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """Draw the same weights in every run: how large an error is depends on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
