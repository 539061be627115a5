"""The contents and costs of a graph, without running it: shapes, arithmetic, bytes, memory, time, effects.

Costs for planning, which come from measured profiles, are in `fxlib.analysis.cost`.
"""

from fxlib.inspection.analyzing import Analysis, NodeFigures, analyze
from fxlib.inspection.calibrate import calibrate
from fxlib.inspection.device import Device, devices, load_device, save_device
from fxlib.inspection.drawing import draw

__all__ = [
    "Analysis",
    "Device",
    "NodeFigures",
    "analyze",
    "calibrate",
    "devices",
    "draw",
    "load_device",
    "save_device",
]
