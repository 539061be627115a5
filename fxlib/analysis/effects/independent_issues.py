"""Which issues no path connects, so that they may become one.

The level of a node is the greatest number of *steps* on a path to it. A step is a wait, a write on a server or a fence,
and any edge from an issue to something other than its own wait. Levels never fall along a path, and every path from one
issue to another has a step on it. So no path connects issues of one level, and the graph stays without a cycle when
they become one node.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.node_kinds import Part

_STEPS = frozenset({Part.WAIT, Part.FENCE, Part.CALL})


def levels(dependencies: Dependencies, kinds: Mapping[int, Hashable]) -> list[int]:
    """Return the level of each place of the program, in time proportional to its edges.

    Args:
        dependencies: of the program.
        kinds: for each issue that may become one with others, the kind of those others. An edge between two of one kind
            is no step: one message keeps its calls in order.
    """
    effects = dependencies.effects.per_node
    found: list[int] = []
    for place, does in enumerate(effects):
        level = 0
        for source in dependencies.sources(place):
            held = effects[source]
            if source in kinds:
                is_step = does.part is not Part.WAIT and kinds[source] != kinds.get(place)
            else:
                is_step = held.part in _STEPS or held.commits
            level = max(level, found[source] + is_step)
        found.append(level)
    return found
