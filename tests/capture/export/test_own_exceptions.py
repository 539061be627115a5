"""A handler of exceptions that only the program raises guards nothing that torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError


class OwnError(RuntimeError):
    pass


torchs_error = torch.OutOfMemoryError


@torch.library.custom_op("fxlib_tests::may_raise", mutates_args=())
def may_raise(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 100:
        raise OwnError
    return x.clone()


@may_raise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Guarded(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return x.relu().reshape(-1) * 2 if x.shape[0] > 1 else x
        except OwnError:
            return x


class GuardsTorchs(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return x.relu()
        except torchs_error:
            return x


class GuardsBoth(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return x.relu()
        except (OwnError, RuntimeError):
            return x


class GuardsAnOperatorOfItsOwn(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return may_raise(x)
        except OwnError:
            return x


X = torch.linspace(-1, 1, 6).view(2, 3)


@pytest.mark.slow
def test_torch_raises_no_exception_of_the_programs() -> None:
    captured = fxlib.capture(Guarded(), sample_inputs=[X], how="export")
    assert torch.equal(captured(X), Guarded()(X))


@pytest.mark.parametrize("kind", [GuardsTorchs, GuardsBoth, GuardsAnOperatorOfItsOwn])
def test_what_may_be_raised_in_a_run_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="an except guards what is computed"):
        fxlib.capture(kind(), sample_inputs=[X], how="export")


class LaterError(Exception):
    pass


caught: Any = LaterError


def fail() -> None:
    raise LaterError


class CatchesByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            fail()
        except caught:
            return x * 3
        except LaterError:
            return x * 5
        return x


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_name_of_an_exception_that_is_bound_anew_decides_as_it_did(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = CatchesByName(), torch.randn(2, 3)
    captured = fxlib.capture(model, sample_inputs=[x] if how == "export" else None, how=how)
    for name, factor in ((LaterError, 3), (KeyError, 5), ((KeyError, LaterError), 3)):
        monkeypatch.setitem(globals(), "caught", name)
        assert torch.equal(captured(x), x * factor)
