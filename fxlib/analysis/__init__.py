"""Facts about a graph: effects, aliases, dependencies, schedules. Nothing here changes a graph."""

from fxlib.analysis.dependencies import Dependencies
from fxlib.analysis.effects import Effects, NodeEffects
from fxlib.analysis.schedule import Schedule, overlapped_order

__all__ = ["Dependencies", "Effects", "NodeEffects", "Schedule", "overlapped_order"]
