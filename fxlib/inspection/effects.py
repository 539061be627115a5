"""What each node does to the world, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import GENERATOR, PEERS, PROCESS, REDUCTIONS, Resource, ServerState, Storage

_NAMES: Mapping[Resource, str] = {
    GENERATOR: "the random generators",
    PROCESS: "this process's memory",
    PEERS: "the order of collectives",
    REDUCTIONS: "the order of what backward reduces",
}


def words_of(effects: Effects) -> dict[Node, tuple[str, ...]]:
    """Return the effects of each node as short phrases; none for work that only makes its own value.

    Memory is named by the first node whose value may lie in it. Memory that nobody in the graph writes is left out.
    """
    names: dict[int, str] = {}
    for node in effects.nodes:
        names.setdefault(effects.aliases.of(node), node.name)
    found = {}
    for node, does in zip(effects.nodes, effects.per_node, strict=True):
        words = [f"fence: {does.fence.sentence()}"] if does.fence is not None else []
        words += _phrase("writes", does.writes, names)
        words += _phrase("reads", does.reads - does.writes, names)
        if does.part is Part.WAIT:
            words = [f"until here: {each}" for each in words]
        found[node] = tuple(words)
    return found


def _phrase(verb: str, resources: Iterable[Resource], names: Mapping[int, str]) -> list[str]:
    listed = sorted({_name(each, names) for each in resources})
    return [f"{verb} {', '.join(listed)}"] if listed else []


def _name(resource: Resource, names: Mapping[int, str]) -> str:
    if isinstance(resource, Storage):
        owner = names.get(resource.alias_class, "the module's own state")
        return f"the memory of {owner}"
    if isinstance(resource, ServerState):
        part = "any state" if resource.name is None else resource.name
        return f"{part} of {resource.server or 'any server'}"
    return _NAMES[resource]
