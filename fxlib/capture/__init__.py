"""Capture: a model becomes a GraphModule in which every remote call is one node."""

from fxlib.capture.api import capture

__all__ = ["capture"]
