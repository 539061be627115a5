"""Capture: a model becomes a GraphModule in which every remote call is one node.

Nothing here runs the graph, or checks before a run that it still holds; `fxlib.runtime` does.
"""

from fxlib.capture.api import capture

__all__ = ["capture"]
