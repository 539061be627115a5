"""Weights that are the same in every run, and a compiler that copies."""

from collections.abc import Iterator

import pytest
import torch

from fxlib.runtime import backends
from tests.passes.local.copies import Copies


@pytest.fixture
def seeded() -> Iterator[None]:
    """Draw the same weights in every run: how large an error is depends on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """A compiler that is there for one test."""
    made = Copies()
    monkeypatch.setitem(backends.BACKENDS, made.name, made)
    return made
