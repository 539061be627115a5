"""A helper that caches its results (`functools.lru_cache`) is left as clean as the capture found it.

A graph takes what a cache holds already, and has an empty one filled by its first run, as the program would.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

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


FACTOR = [2.0]


@functools.lru_cache
def factor_of(name: str, *, more: float = 0.0) -> float:
    return FACTOR[0] + more


@functools.cache
def mask_of(size: int) -> torch.Tensor:
    return torch.ones(size) * FACTOR[0]


KEPT: dict[str, tuple[Any, Run]] = {
    "a number": (factor_of, lambda _, x: x * factor_of("a")),
    "by keyword": (factor_of, lambda _, x: x * factor_of("a", more=1.0)),
    "a tensor": (mask_of, lambda _, x: x * mask_of(4)),
    "through a partial function": (mask_of, lambda _, x: x * functools.partial(mask_of, 4)()),
}


@pytest.fixture
def _empty_caches() -> Iterator[None]:
    for each in (factor_of, mask_of):
        each.cache_clear()
    FACTOR[0] = 2.0
    yield
    for each in (factor_of, mask_of):
        each.cache_clear()


@pytest.mark.usefixtures("_empty_caches")
@pytest.mark.parametrize("case", KEPT)
def test_what_a_cache_holds_already_is_what_a_graph_takes(case: str) -> None:
    cache, run = KEPT[case]
    model = Model(run)
    expected = model(X)
    held = cache.cache_info().currsize
    FACTOR[0] = 5.0
    captured = fxlib.capture(model)
    assert cache.cache_info().currsize == held
    assert torch.equal(captured(X), expected)
    cache.cache_clear()
    assert torch.equal(captured(X), model(X))
    assert not torch.equal(captured(X), expected)


@pytest.mark.usefixtures("_empty_caches")
@pytest.mark.parametrize("case", [each for each in KEPT if each not in ("a tensor", "through a partial function")])
def test_a_cache_is_filled_by_the_first_run_as_the_program_would(case: str) -> None:
    cache, run = KEPT[case]
    model = Model(run)
    captured = fxlib.capture(model)
    assert cache.cache_info().currsize == 0
    first = captured(X)
    assert not captured._fxlib.broken(grad_enabled=True)
    FACTOR[0] = 5.0
    assert torch.equal(captured(X), first)
    assert torch.equal(model(X), first)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = 4

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return torch.ones(self.size) * FACTOR[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


@pytest.mark.usefixtures("_empty_caches")
def test_a_tensor_that_the_first_run_would_keep_is_computed_before_the_capture() -> None:
    for model in (Model(KEPT["a tensor"][1]), Lazy()):
        with pytest.raises(CaptureError, match=r"fills a cache .* Call the cached function once before the capture"):
            fxlib.capture(model)
    assert mask_of.cache_info().currsize == 0


@functools.lru_cache
def scale_of(name: str) -> float:
    return FACTOR[0]


@pytest.mark.usefixtures("_empty_caches")
def test_what_another_filled_a_cache_with_is_what_counts() -> None:
    scale_of.cache_clear()
    model = Model(lambda _, x: x * scale_of("a"))
    captured = fxlib.capture(model)
    FACTOR[0] = 9.0
    expected = model(X)  # fills the cache, with another number than the capture computed
    FACTOR[0] = 2.0
    assert torch.equal(captured(X), expected)


@pytest.mark.usefixtures("_empty_caches")
def test_a_cached_property_is_computed_once() -> None:
    model = Lazy()
    model(X)
    FACTOR[0] = 5.0
    captured = fxlib.capture(model)
    assert "mask" in vars(model)
    first = captured(X)
    assert torch.equal(first, X * 2)
    assert not captured._fxlib.broken(grad_enabled=True)
    FACTOR[0] = 7.0
    assert torch.equal(captured(X), first)
