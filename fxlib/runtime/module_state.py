"""What a captured module keeps besides its graph and its weights, and the checks of whether the graph may run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from fxlib.errors import FxlibWarning
from fxlib.runtime.ahead import Ahead
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.graph_set import GraphSet
from fxlib.runtime.guards.conditions import Conditions, Parameter
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.folded_weights import WeightAssumptions
from fxlib.runtime.lowering import LoweredProgram
from fxlib.runtime.own_code import CheckedProgram
from fxlib.runtime.state import Mirror
from fxlib.runtime.submodule_cache import SubmoduleCache

Expected: TypeAlias = Sequence[Parameter] | GuardedCodeGen
"""The parameters of a forward, or the guards on what it is given."""


@dataclass(slots=True)
class ModuleState:
    """Everything that a captured module keeps, in its attribute `_fxlib`: a model has no attribute of that name.

    The methods answer in words; an empty string means that nothing is wrong.
    """

    conditions: Conditions
    original: nn.Module | None
    """The user's own model; None in a trial."""
    tape: Tape = field(default_factory=Tape)
    """The gradients that `fxlib.push_gradients` will push."""
    mirror: Mirror | None = None
    """The original's root as the module last saw it."""
    constants: tuple[str, ...] = ()
    """The attributes of the root that the graph reads."""
    weight_assumptions: WeightAssumptions = field(default_factory=WeightAssumptions)
    """The assumptions of the graph about weights and inputs."""
    graphs: GraphSet[Any] = field(default_factory=GraphSet)
    """The graphs for calls that this one does not fit, and how often each ran."""
    submodule_cache: SubmoduleCache = field(default_factory=SubmoduleCache)
    """The object that the generated code is given in place of the module."""
    lowered: LoweredProgram = field(default_factory=LoweredProgram)
    """What runs in place of a graph that has parts for a backend to compile."""
    checked: CheckedProgram = field(default_factory=CheckedProgram)
    """What runs in place of a graph that runs code of the program's own."""
    changed_in_step: str = ""
    """What such code has changed in mid-step of what the forward reads, in words; empty if it never has."""
    captured_with: Any = None
    """The options of the capture; None where the graph was received, or made in another way."""
    ahead: Ahead | None = None
    """The calls that `fxlib.pipeline` has made ahead of forwards to come; None where there never was any."""
    told: bool = False
    """Whether the user was warned that the original runs."""

    def broken(self, *, grad_enabled: bool) -> str:
        """Whether a condition of the capture does not hold any more."""
        if self.changed_in_step:
            return self.changed_in_step
        conditions = self.conditions
        if self.weight_assumptions.on_weights and not grad_enabled and not conditions.asks_grad_mode:
            # Made for inference: it needs no gradients, whatever was recorded at capture.
            return conditions.broken(grad_enabled=conditions.grad_enabled)
        return conditions.broken(grad_enabled=grad_enabled)

    def stale(self, module: nn.Module, *, grad_enabled: bool) -> str:
        """Whether the weights are not those that the graph's constants were computed from."""
        assumed = self.weight_assumptions
        return assumed.broken(module, grad_enabled=grad_enabled) if assumed.on_weights else ""

    def tell_of_original(self, name: str, reason: str) -> None:
        """Tell the user, once, why the original runs in place of the module of this name."""
        self.warn_once(f"the original forward of {name} runs, not the captured one: {reason}")

    def warn_once(self, text: str) -> None:
        """Warn the user unless it was done before."""
        if not self.told:
            self.told = True
            warnings.warn(text, FxlibWarning, stacklevel=4)

    def _misfit_of_export(self, expected: GuardedCodeGen, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Whether an argument has got an attribute for which an exported forward asked."""
        python = self.conditions.python
        if not python.arguments:
            return ""
        return python.misfit({**dict(zip(expected.pytree_info.orig_args, args, strict=False)), **kwargs})

    def misfit(self, expected: Expected, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Whether the graph is not for one of the arguments."""
        if isinstance(expected, GuardedCodeGen):
            return expected.misfit(tuple(args), kwargs) or self._misfit_of_export(expected, args, kwargs)
        broken = self.conditions.misfit(expected, args, kwargs)
        if broken or not self.weight_assumptions.has_ranks:
            return broken
        given = dict(zip([each.name for each in expected], args, strict=False)) | dict(kwargs)
        return self.weight_assumptions.misfit(given)
