"""Facts about a graph: effects, aliases, dependencies, costs, schedules.

Nothing here changes a graph (`fxlib.passes` does) or runs one (`fxlib.inspection` does).
"""

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import Effects, NodeEffects
from fxlib.analysis.scheduling.schedule import Schedule, overlapped_order

__all__ = ["Dependencies", "Effects", "NodeEffects", "Schedule", "overlapped_order"]
