"""How a module meets the world, seen from outside: what no pass may change beyond its declaration."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxlib.analysis.behaviour import Behaviours, Part
from fxlib.runtime.calls import is_issue, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """A module's signature, state and effects, taken before a pass and compared after it."""

    signature: tuple[Hashable, ...]
    state: dict[str, int]
    """Identity of each parameter and buffer, by name."""
    calls: tuple[str, ...]
    """Every call once, sorted: the name as captured."""
    halves: tuple[str, ...]
    """Calls that are issued and never waited for, sorted."""
    sequences: tuple[tuple[str, ...], tuple[str, ...]]
    """Random operators and fences, each in their order."""
    nodes: tuple[Hashable, ...]

    @classmethod
    def of(cls, module: GraphModule) -> Conduct:
        """Look at a module."""
        nodes = list(module.graph.nodes)
        calls, halves, random, fences = [], [], [], []
        lookup = Behaviours(module)
        for node in nodes:
            behaviour = lookup.of(node)
            if behaviour.part in {Part.CALL, Part.ISSUE} or is_issue(node):
                calls.append(call_name(node))
                if behaviour.part is not Part.CALL and not node.users:
                    halves.append(call_name(node))
            elif behaviour.part is Part.FENCE and kind_of(node) is None:
                fences.append(node.name)
            elif behaviour.operator is not None and behaviour.operator.random:
                random.append(node.name)
        return cls(
            signature=tuple((node.name, str(node.target)) for node in nodes if node.op == "placeholder"),
            state={name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()},
            calls=tuple(sorted(calls)),
            halves=tuple(sorted(halves)),
            sequences=(tuple(random), tuple(fences)),
            nodes=tuple((node.name, node.op, node.target, node.args, tuple(node.kwargs.items())) for node in nodes),
        )

    def broken_by(self, after: Conduct, *, changes: int, may_change_weights: bool, same_effects: bool) -> str:
        """Say which rule the change from this conduct to `after` breaks; empty if none."""
        if after.signature != self.signature:
            return "the pass changed the module's inputs"
        if not may_change_weights and after.state != self.state:
            return "the pass changed parameters or buffers without declaring that it needs weights"
        if not changes and after.nodes != self.nodes:
            return "the pass reports no changes, and changed the graph"
        if after.halves != self.halves:
            return f"calls are left without a wait: {', '.join(set(after.halves) - set(self.halves))}"
        if same_effects and after.calls != self.calls:
            return f"a bitwise pass lost or added calls: {', '.join(set(after.calls) ^ set(self.calls))}"
        if same_effects and after.sequences != self.sequences:
            return "a bitwise pass lost, added or reordered random operators or opaque calls"
        return ""


def call_name(node: Node) -> str:
    """Return the name of a call as captured, which its halves share."""
    return str(node.meta.get("call", node.name))
