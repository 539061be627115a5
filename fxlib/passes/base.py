"""The base class of every pass: it enforces what a pass declares."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from torch.fx import GraphModule

from fxlib.errors import PassError
from fxlib.reasons import Declined

Preserves = Literal["bitwise", "tolerance", "lossy"]
Need = Literal["weights", "sample_inputs", "eval_mode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass returns: the module (changed in place or new), how many changes, and what it declined."""

    module: GraphModule
    changes: int
    declined: tuple[Declined, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GraphPass(ABC):
    """One transform of a GraphModule. Subclasses are frozen keyword-only dataclasses whose fields are their options."""

    name: ClassVar[str]
    preserves: ClassVar[Preserves]
    needs: ClassVar[frozenset[Need]]
    version: ClassVar[str]

    @abstractmethod
    def run(self, module: GraphModule) -> PassResult:
        """Transform the module. The graph may be left unlinted and not recompiled: the recipe does both once."""

    def requires(self, module: GraphModule) -> None:
        """Raise PassError if the pass does not apply to this module."""

    def ensures(self, module: GraphModule) -> None:
        """Raise PassError if the pass broke its own promise on its output."""
