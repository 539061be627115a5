"""What a model's class has in a form of its own, a captured module has in that form, too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import fxlib
from fxlib.runtime import CapturedModule

X = torch.randn(3, 4)


class Renewed(nn.Module):
    """Doubles the scale that it reads from checkpoints of an earlier version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    @override
    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < self._version:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Particular(Renewed):
    """Leaves a layer out of checkpoints, and a parameter out of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Any] = []

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("linear")}

    @override
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        linear = {f"linear.{name}": value for name, value in self.linear.state_dict().items()}
        return super().load_state_dict({**state_dict, **linear}, *args, **kwargs)

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (each for each in super().parameters(recurse) if each is not self.scale)

    @override
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)

    @override
    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves.append(args)
        return super().to(*args, **kwargs)


def modules(model: nn.Module) -> list[CapturedModule]:
    captured = fxlib.capture(model)
    return [captured, fxlib.optimize(captured), copy.deepcopy(captured)]  # type: ignore[list-item]


def test_a_checkpoint_has_the_version_of_the_model() -> None:
    model = Renewed()
    for module in modules(model):
        other = Renewed()
        other.load_state_dict(nn.Sequential(module)[0].state_dict())
        assert torch.equal(other.scale, model.scale)


@pytest.mark.parametrize("place", range(3), ids=["captured", "rewritten", "copied"])
def test_what_a_model_saves_loads_trains_resets_and_moves_is_its_own_affair(place: int) -> None:
    module: Any = modules(Particular())[place]
    original: Any = module._fxlib.original
    assert list(module.state_dict()) == ["scale"]
    module.load_state_dict({"scale": torch.full((4,), 3.0)})
    assert original.scale.tolist() == module.scale.tolist() == [6.0] * 4  # the dict tells of no version
    assert [*map(id, module.parameters())] == [*map(id, original.linear.parameters())]
    module(X).sum().backward()
    module.zero_grad()
    assert torch.equal(original.linear.bias.grad, torch.zeros(4))
    assert module.to(torch.float64) is module
    assert original.moves == [(torch.float64,)]
    assert module(X.double()).dtype is torch.float64
