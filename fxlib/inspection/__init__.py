"""What a graph is made of and what it costs, without running it: shapes, arithmetic, bytes, memory, time, effects."""

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
