"""A compiler for tests that makes nothing of a part but results with memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

import fxlib
from fxlib.passes import Lower
from fxlib.recipes.recipes import Recipe
from fxlib.runtime import CapturedModule


class Copies:
    """A compiler that makes nothing of a part but results with memory of their own, as all compilers may."""

    name, package, keeps_weights = "copies", "torch", False

    def __init__(self) -> None:
        self.compiled: list[GraphModule] = []
        self.runs = 0

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert isinstance(part, GraphModule)
        self.compiled.append(part)

        def run(*values: Any) -> Any:
            self.runs += 1
            return self.results(part(*values))

        return run

    def results(self, found: tuple[Tensor, ...]) -> Any:
        return tuple(each.clone() for each in found)


def lowered(model: nn.Module, backend: str = "copies", **options: Any) -> CapturedModule:
    captured = model if isinstance(model, CapturedModule) else fxlib.capture(model)
    recipe = Recipe(name="lowered", passes=(Lower(backend=backend, **options),))
    made = recipe.run(captured).module
    assert isinstance(made, CapturedModule)
    return made
