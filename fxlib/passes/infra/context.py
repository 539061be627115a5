"""What a pass knows besides its module: the profile, the workload, and analyses of the graph as it is now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from torch.fx import GraphModule

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import Effects
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Workload


class Analysis(Protocol):
    """A class whose instances tell something of one graph."""

    @classmethod
    def of(cls, module: GraphModule) -> Self:
        """Analyse a module's graph as it is now."""
        ...


A = TypeVar("A", bound=Analysis)


@dataclass(slots=True, eq=False)
class Context:
    """One context serves all passes of a recipe, one after another.

    An analysis is made when a pass first asks for it, and kept for the passes behind it until the graph is another one.
    A pass that reports changes leaves those alone that it has handed to `keep`, and nodes, targets and arguments are
    compared besides, so no pass has to declare what it leaves intact.

    Args:
        module: the module that the next pass works on.
        profile: what the program was measured to take; None where nobody measured it.
        workload: how its steps run; None where nobody said.
    """

    module: GraphModule
    profile: Profile | None = None
    workload: Workload | None = None
    _kept: dict[type[Any], Any] = field(default_factory=dict, repr=False)
    _nodes: list[tuple[object, ...]] = field(default_factory=list, repr=False)
    _left: set[type[Any]] = field(default_factory=set, repr=False)

    def get(self, analysis: type[A]) -> A:
        """Return an analysis of the module's graph as it is now."""
        self._forget_if_changed()
        if analysis not in self._kept:
            self._note(analysis.of(self.module))
        found: A = self._kept[analysis]
        return found

    def keep(self, made: Analysis) -> None:
        """Leave an analysis that a pass has made of the graph as it is now for the passes behind it."""
        self._forget_if_changed()
        self._left |= self._note(made)

    def pass_ended(self, *, changes: int) -> None:
        """Drop what was analysed before the changes that a pass has made, which may be in modules alone."""
        if changes:
            self._kept = {kind: made for kind, made in self._kept.items() if kind in self._left}
        self._left.clear()

    def _note(self, made: Analysis) -> set[type[Any]]:
        found: dict[type[Any], Any] = {type(made): made}
        if isinstance(made, Dependencies):
            found[Effects] = made.effects
        self._kept |= found
        return set(found)

    def costs(self) -> Costs:
        """Return what the nodes and calls of the graph take, by the profile, or estimated."""
        return Costs.of(self.module, self.profile)

    def _forget_if_changed(self) -> None:
        nodes: list[tuple[object, ...]] = [
            (node, node.target, node.args, node.kwargs) for node in self.module.graph.nodes
        ]
        if nodes != self._nodes:
            self._kept.clear()
            self._nodes = nodes
