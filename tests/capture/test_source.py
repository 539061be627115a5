"""Programs that come from no file are captured as those of files: from a console, a notebook, or `python -c`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxlib
from fxlib.capture import source
from fxlib.errors import CaptureError

TYPED = """
import torch
from torch import nn

class Asks(nn.Module):
    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = x * 2
        return x

class Catches(nn.Module):
    def forward(self, x):
        try:
            return x @ x
        except RuntimeError:
            return x * 2
"""
FILES = ["<stdin>", "<python-input-0>", "<ipython-input-3-1f2e>", "<string>"]
X = torch.ones(2, 3)


def typed(file: str, home: str) -> dict[str, Any]:
    """Return what a text defines, if it is run as code of this file, in a module of this name."""
    scope: dict[str, Any] = {"__name__": home}
    exec(compile(TYPED, file, "exec"), scope)  # noqa: S102 - the text is above
    return scope


@pytest.mark.parametrize("home", ["__main__", "notebook"])
@pytest.mark.parametrize("file", FILES)
def test_a_model_that_is_typed_in_is_answered_as_one_from_a_file(file: str, home: str) -> None:
    captured = fxlib.capture(typed(file, home)["Asks"]())
    assert torch.equal(captured(X), X * 2)


@pytest.mark.parametrize("file", FILES)
def test_what_a_model_that_is_typed_in_may_catch_is_refused(file: str) -> None:
    with pytest.raises(CaptureError, match="an except guards what is computed here") as refused:
        fxlib.capture(typed(file, "__main__")["Catches"]())
    assert refused.value.where == f"{file}:14"


@dataclass
class Made:
    value: Any


class Pair(NamedTuple):
    one: Any
    other: Any


class Compares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if Made(x) == Made(x * 2) else x


def test_what_is_generated_for_a_class_is_not_where_the_users_program_is() -> None:
    with pytest.raises(CaptureError) as refused:
        fxlib.capture(Compares())
    assert str(refused.value.where).startswith(__file__)
    for each in (Made.__init__, Made.__eq__, Pair.__new__):
        function: Any = each
        assert not source.is_users_code(function.__code__, function.__globals__)
