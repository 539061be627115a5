"""Which values of a module's own keep through a forward, so that what is computed from them may be computed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.resources import PROCESS, Storage
from fxlib.analysis.operators.leaf_modules import attribute
from fxlib.reasons import Reason
from fxlib.runtime.guards.folded_weights import sources_of
from fxlib.runtime.submodules import submodule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """A parameter or buffer, and the names of all that its value was computed from (of itself, as a rule)."""

    name: str
    tensor: torch.Tensor
    sources: frozenset[str]

    @classmethod
    def held(cls, owner: nn.Module, path: str, name: str) -> Weight | None:
        """Return the one that a submodule at `path` holds under a name; None if the slot is empty."""
        tensor = owner._parameters.get(name)
        tensor = getattr(owner, name) if tensor is None else tensor
        full = f"{path}.{name}"
        return None if tensor is None else cls(name=full, tensor=tensor, sources=frozenset({full}))

    @classmethod
    def read(cls, module: GraphModule, node: object) -> Weight | None:
        """Return the one that a `get_attr` node reads; None if it is no such node."""
        if not isinstance(node, Node) or node.op != "get_attr":
            return None
        tensor = attribute(module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            return None
        return cls(name=str(node.target), tensor=tensor, sources=sources_of(node))


class Steadiness:
    """Answers, for one program, whether weights are at a node what they were before the forward."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        """Note what the program writes, and where it first runs code that may write anything."""
        self._effects = effects
        self._written: set[int] = set()
        self._unsure_from = len(effects.nodes)
        for place, (node, does) in enumerate(zip(effects.nodes, effects.per_node, strict=True)):
            if does.fence is Reason.OPAQUE_NEIGHBOUR or PROCESS in does.writes:
                self._unsure_from = min(self._unsure_from, place)
            if does.writes and not _is_idle_norm(module, node):
                self._written |= {each.alias_class for each in does.writes if isinstance(each, Storage)}

    @property
    def written(self) -> set[int]:
        """The classes of memory that the program writes."""
        return self._written

    def refusal(self, node: Node, weights: Iterable[torch.Tensor]) -> Reason | None:
        """Return why the values that the node sees may be others than those of before; None if they are the same."""
        if self._effects.index[node] > self._unsure_from:
            return Reason.OPAQUE_NEIGHBOUR
        written = self._written and not self._written.isdisjoint(self._effects.aliases.of_state(weights))
        return Reason.WEIGHT_WRITTEN if written else None


def _is_idle_norm(module: GraphModule, node: Node) -> bool:
    """Whether the node is a norm whose statistics rest: its flag is a condition of the capture."""
    if node.op != "call_module":
        return False
    called = submodule(module, str(node.target))
    return isinstance(called, _NormBase) and not called.training
