"""How often keys come again, and how unevenly they are named: what a description tells, made-up batches keep."""

from __future__ import annotations

import pytest
import torch

import fxlib
from fxlib.errors import WorkloadError
from fxlib.spec.inputs import Tensors, draw_keys, repeats_in, skew_of

ROWS = 1000


def described(batches: list[torch.Tensor], count: int = 4) -> fxlib.Workload:
    return fxlib.Workload.describe([(each,) for each in batches], count=count, mode="forward")


def drawn(workload: fxlib.Workload) -> list[torch.Tensor]:
    return [batch.inputs[0] for batch in workload.drawn_batches]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_as_many_keys_come_again_in_made_up_batches_as_in_real_ones(share: float) -> None:
    shared = round(share * 128)
    rows = torch.stack([torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)) for _ in range(8)], 1)
    own = rows[shared:].split(max(128 - shared, 1))
    real = [torch.cat([rows[:shared], each]) for each in own[:4]]
    found = repeats_in(drawn(described(real, count=20)))
    assert found == pytest.approx(share, abs=0.06)
    assert max(int(each.max()) for each in drawn(described(real))) < ROWS


def test_the_mean_over_batches_that_come_in_turn_is_kept_although_the_first_repeats_none() -> None:
    real = [torch.arange(64) + 32 * place for place in range(4)]
    made = drawn(described(real, count=4))
    assert repeats_in([*made, made[0]]) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.4])
def test_keys_are_named_as_unevenly(skew: float) -> None:
    generator = torch.Generator().manual_seed(2)
    real = [
        draw_keys((512, 4), ROWS, skew=skew, repeats=None, before=None, count=1, generator=generator) for _ in range(8)
    ]
    workload = described(real, count=8)
    assert workload.spec is not None
    (told,) = workload.spec.inputs
    assert told.skew == pytest.approx(skew, abs=0.12)
    assert skew_of(drawn(workload), ROWS) == pytest.approx(skew, abs=0.15)


def test_many_keys_cost_no_more_to_tell() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = draw_keys((4096,), 10**9, skew=1.1, repeats=None, before=None, count=1, generator=generator)
    assert skew_of([keys], 10**9) == pytest.approx(1.1, abs=0.1)
    assert 0 <= int(keys.min()) <= int(keys.max()) < 10**9


def test_what_is_no_key_is_drawn_as_before() -> None:
    one = fxlib.Workload.describe([(torch.tensor(3), torch.randn(4))], mode="forward")
    assert one.spec is not None
    assert (one.spec.inputs[0].repeats, one.spec.inputs[0].skew, one.spec.inputs[1].repeats) == (None, 0.0, None)
    assert int(one.drawn_batches[0].inputs[0]) == 3


@pytest.mark.parametrize("figures", [{"repeats": 1.5}, {"repeats": -0.1}, {"skew": -1.0}, {"skew": 1e9}])
def test_figures_out_of_range_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(WorkloadError):
        Tensors(shape=(2,), dtype=torch.int64, low=0, high=2, **figures)
