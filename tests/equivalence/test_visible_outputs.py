"""Whatever a module gives back, a difference in it is found, and none is found where there is none."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxlib
from fxlib import verify
from fxlib.errors import FxlibWarning, PassError

X = torch.linspace(-2, 3, 12).reshape(4, 3)


class Gives(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Scores:
    logits: torch.Tensor
    rows: list[torch.Tensor]


def quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(x, scale, 0, torch.qint8)


def channels(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.quantize_per_channel(x, torch.full((4,), scale).double(), torch.zeros(4).long(), 0, torch.qint8)


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x[:2]])


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)


UNUSUAL: dict[str, Callable[..., Any]] = {
    "number": lambda x: float(x.sum()),
    "not a number": lambda _: math.nan,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "bfloat16": lambda x: x.bfloat16(),
    "complex": lambda x: torch.complex(torch.ones_like(x), x),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "unsigned": lambda x: (x + 9).to(torch.uint16),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: quantized(x, 0.05),
    "quantized by channel": lambda x: channels(x, 0.05),
    "nested": nested,
    "jagged": jagged,
    "named tuple": lambda x: Pair(x * 1, x * 2),
    "dataclass": lambda x: Scores(x * 1, [x * 2]),
    "parameter": lambda x: nn.Parameter(x * 2),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rtol", [0.0, 1e-6])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_outputs_of_any_kind_are_compared(kind: str, rtol: float) -> None:
    give = UNUSUAL[kind]
    assert verify(Gives(give), Gives(give), [X], rtol=rtol)
    if kind != "not a number":
        assert not verify(Gives(give), Gives(lambda x: give(x + 1)), [X], rtol=rtol)


DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "zeros of two signs": (lambda _: 0.0, lambda _: -0.0),
    "list and tuple": (lambda x: [x * 1], lambda x: (x * 1,)),
    "dict and list": (lambda x: {0: x * 1}, lambda x: [x * 1]),
    "classes of dicts": (lambda x: OrderedDict(a=x * 1), lambda x: {"a": x * 1}),
    "order of keys": (lambda x: {"a": x * 1, "b": x * 1}, lambda x: {"b": x * 1, "a": x * 1}),
    "empty containers": (lambda _: [], lambda _: ()),
    "a fresh copy": (lambda x: x, lambda x: x.clone()),
    "a fresh copy of a view": (lambda x: x[0], lambda x: x[0].clone()),
    "one result twice": (lambda x: [x * 1] * 2, lambda x: [x * 1, x * 1]),
    "strides": (lambda x: x * 1, lambda x: (x * 1).t().contiguous().t()),
    "scales": (lambda x: quantized(x, 0.05), lambda x: quantized(x, 0.06)),
    "stored zeros": (lambda x: (x * 0).to_sparse(), lambda x: (x * 0 + 1).to_sparse() * 0),
    "what takes a gradient": (lambda x: x * 1, lambda x: x.clone().requires_grad_()),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", DIFFERENT)
def test_what_a_caller_could_tell_apart_differs(what: str) -> None:
    one, other = DIFFERENT[what]
    assert not verify(Gives(one), Gives(other), [X])


def test_no_tolerance_covers_another_integer_or_flag_or_imaginary_part() -> None:
    for one, other in [
        (lambda x: (x * 0).long() + 100_001, lambda x: (x * 0).long() + 100_000),
        (lambda x: (x * 0).long() + 2**60, lambda x: (x * 0).long() + 2**60 + 1),
        (lambda x: x > 0, lambda x: x > 99),
        (lambda x: torch.complex(x, x), lambda x: torch.complex(x, x + 1)),
        (lambda x: x.abs() / 0, lambda x: x.abs() * 0 + 3e38),
    ]:
        assert not verify(Gives(one), Gives(other), [X], rtol=1e-3, atol=0.01)
    with pytest.raises(PassError, match="a finite number, and not negative"):
        verify(Gives(torch.relu), Gives(torch.relu), [X], rtol=math.inf)


def test_gradients_come_from_imaginary_parts_too() -> None:
    x = X.clone().requires_grad_()
    same = verify(Gives(lambda x: torch.complex(x, x)), Gives(lambda x: torch.complex(x, x.detach())), [x])
    assert [each.where for each in same.differences] == ["grad of input[0][0]"]


def test_inputs_in_dataclasses_and_generators_are_copied() -> None:
    given, generator = Scores(X.clone(), [X.clone()]), torch.Generator().manual_seed(0)

    def writes(scores: Scores, generator: torch.Generator) -> torch.Tensor:
        return scores.rows[0].add_(1) + torch.rand(4, 3, generator=generator)

    assert verify(Gives(writes), Gives(writes), [given, generator])
    assert torch.equal(given.rows[0], X)
    wrote = verify(
        Gives(writes), Gives(lambda scores, _: writes(scores, torch.Generator().manual_seed(0)) * 1), [given, generator]
    )
    assert [each.where for each in wrote.differences] == ["input[0][1]"]


class Norm(nn.Module):
    """Does to its state what `twist` says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain, self.twist = nn.BatchNorm1d(3), torch.zeros(2), ""
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        if self.twist in ("cache", "plain"):
            getattr(self, self.twist).add_(1)
        if self.twist == "eval":
            self.norm.eval()
        if self.twist == "frozen":
            self.norm.weight.requires_grad_(False)
        return y


@pytest.mark.parametrize("twist", ["cache", "plain", "eval", "frozen"])
def test_state_that_no_state_dict_shows_is_compared_and_put_back(twist: str) -> None:
    one = Norm()
    other = copy.deepcopy(one)
    other.twist = twist
    assert not verify(one, other, [X])
    assert verify(other, other, [X])
    assert (other.norm.training, other.norm.weight.requires_grad) == (True, True)
    assert int(other.plain.sum()) == int(other.get_buffer("cache").sum()) == 0


class Layers(nn.Module):
    """Takes rows by number, in float32 and in complex64."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(self.rows(rows)).sigmoid()
        return y, (y.to(torch.complex64) @ self.turn).abs()


def test_gradients_are_near_those_of_the_reference() -> None:
    model = Layers()
    found = verify(model, model, [torch.arange(6)], reference="float64")
    of_gradients = [each for each in found.distances if each.where.startswith("grad of ")]
    assert len(of_gradients) == 4
    assert all(0 <= (each.first_from_reference or 0) < 1e-5 for each in found.distances)


@pytest.mark.slow
def test_it_says_where_inputs_are_not_those_of_the_export() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - 1 if x.shape[0] > 1 else x * 2

    model = Chooses()
    exported = fxlib.capture(model, sample_inputs=[X])
    assert not verify(model, exported, [X]).notes
    with pytest.warns(FxlibWarning, match="the original forward of Chooses runs"):
        (note,) = verify(model, exported, [X[:1]]).notes
    assert "the graph is for (4, 3)" in note
