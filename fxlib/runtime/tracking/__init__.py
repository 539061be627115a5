"""The state of one running forward: remote results that take a gradient, who owns that, and what is in flight.

The operators themselves are in `fxlib.runtime.ops`; how gradients are sent is in `fxlib.runtime.gradients`.
"""
