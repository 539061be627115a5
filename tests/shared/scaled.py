"""A class that wraps a tensor, as those of quantization libraries do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch


class Scaled(torch.Tensor):
    """A tensor with a scale, which its context holds."""

    def __new__(cls, integers: torch.Tensor, *_: object) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)
        return made

    def __init__(self, integers: torch.Tensor, scale: float | None) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], tuple[float | None]]:
        return ["integers"], (self.scale,)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: tuple[float | None], *_: object) -> Scaled:
        return Scaled(inner["integers"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = func(*(each.integers if isinstance(each, Scaled) else each for each in args), **(kwargs or {}))
        return Scaled(made, args[0].scale)
