"""A helper that caches its results (`functools.lru_cache`) is left as clean as the capture found it."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from fxlib.errors import CaptureError
from tests.capture.recording.stateful_model import HOW, Model, Run, X, captured


@functools.lru_cache
def cached(size: int) -> torch.Tensor:
    return torch.ones(size).cumsum(0)


CACHED: list[Run] = [
    lambda _, x: x * cached(4),
    lambda _, x: x * next(map(cached, [4])),
    lambda _, x: x * functools.partial(cached, 4)(),
]


@HOW
@pytest.mark.parametrize("run", CACHED)
def test_a_helper_that_caches_what_it_makes_is_left_clean(run: Run, how: str) -> None:
    cached.cache_clear()
    model = Model(run)
    with contextlib.suppress(CaptureError):
        model, module = captured(run, how)
        assert torch.equal(module(X), model(X))
    assert type(cached(4)) is torch.Tensor
    assert torch.equal(model(X), model(X))
