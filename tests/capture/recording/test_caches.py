"""A helper that caches its results (`functools.lru_cache`) is left as clean as the capture found it."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import fxlib
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


@pytest.mark.slow
@HOW
def test_each_run_asks_a_cache_as_often_as_the_program_does(how: str) -> None:
    @functools.lru_cache(maxsize=2)
    def scale(number: int) -> float:
        return number * 2.0

    scale(1)
    model, module = captured(lambda _, x: x * scale(1) + scale(1), how)
    for other in (10, 11, 12):  # of two results, the one that was asked for least recently is forgotten
        before = scale.cache_info().hits
        module(X)
        assert scale.cache_info().hits == before + 2
        scale(other)
    assert set(fxlib.usage(module).original) == set()
    assert torch.equal(module(X), model(X))


@HOW
def test_a_cache_of_results_for_tensors_is_refused(how: str) -> None:
    @functools.lru_cache
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(CaptureError, match="caches its results, with a tensor"):
        captured(lambda _, x: doubled(x), how)
