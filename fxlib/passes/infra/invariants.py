"""What of a module can be seen from outside, and what no pass may change beyond its declaration."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.runtime.ops.batches import is_batch, waits_of
from fxlib.runtime.ops.calls import is_issue, is_wait
from fxlib.runtime.ops.record import call_name

MERGED = "merged"
"""Names of the calls, as captured, for whose results a call stands besides its own: in the metadata of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """A module's signature, state and effects, taken before a pass and compared after it."""

    signature: tuple[Hashable, ...]
    state: dict[str, int]
    """Identity of each parameter and buffer, by name."""
    calls: tuple[str, ...]
    """Every call once, sorted: the name as captured. One that stands for others counts as them, too."""
    unwaited: tuple[str, ...]
    """Calls that are issued and never waited for, sorted."""
    sequences: tuple[tuple[str, ...], tuple[str, ...]]
    """Random operators and fences, each in their order."""
    nodes: list[tuple[object, ...]]

    @classmethod
    def of(cls, module: GraphModule) -> Invariants:
        """Look at a module, in linear time."""
        nodes, lookup = list(module.graph.nodes), Behaviours(module)
        calls: list[str] = []
        unwaited, random, fences = [], [], []
        for node in nodes:
            behaviour = lookup.of(node)
            part, operator = behaviour.part, behaviour.operator
            if part is Part.LOCAL:
                if operator is not None and operator.random:
                    random.append(node.name)
            elif part in _STARTS or (part is Part.FENCE and is_issue(node)):
                calls.extend(_calls_in(node))
                if part is not Part.CALL and not node.users:
                    unwaited.append(call_name(node))
            elif part is Part.FENCE and not is_wait(node):
                fences.append(node.name)
        return cls(
            signature=tuple((node.name, node.target) for node in nodes if node.op == "placeholder"),
            state=_state(module),
            calls=tuple(sorted(calls)),
            unwaited=tuple(sorted(unwaited)),
            sequences=(tuple(random), tuple(fences)),
            nodes=_nodes(module),
        )

    def after(self, module: GraphModule, *, changes: int) -> Invariants:
        """Look at the module that a pass made of this one, briefly where the pass did nothing."""
        if not changes and self.nodes == _nodes(module) and self.state == _state(module):
            return self
        return Invariants.of(module)

    def broken_by(self, after: Invariants, *, changes: int, may_change_weights: bool, same_effects: bool) -> str:
        """Say which rule the change from these invariants to `after` breaks; empty if none."""
        if after.signature != self.signature:
            return "the pass changed the module's inputs"
        if not may_change_weights and after.state != self.state:
            return "the pass changed parameters or buffers without declaring that it needs weights"
        if not changes and after.nodes != self.nodes:
            return "the pass reports no changes, and changed the graph"
        if after.unwaited != self.unwaited:
            return f"calls are left without a wait: {_listed(self.unwaited, after.unwaited)}"
        if same_effects and after.calls != self.calls:
            return f"a bitwise pass lost or added calls: {_listed(self.calls, after.calls)}"
        if same_effects and after.sequences != self.sequences:
            return "a bitwise pass lost, added or reordered random operators or opaque calls"
        return ""


_STARTS = (Part.CALL, Part.ISSUE)


def _calls_in(node: Node) -> Iterator[str]:
    waits = waits_of(node) if is_batch(node) else None
    for call in (node,) if waits is None else waits:
        yield call_name(call)
        yield from call.meta.get(MERGED, ())


def _nodes(module: GraphModule) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in module.graph.nodes]


def _state(module: GraphModule) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _listed(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    return ", ".join(sorted(set(one) ^ set(other)))
