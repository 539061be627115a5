"""The state of one running forward: remote results that take gradients, the gradients' owners, and calls in flight.

The operators themselves are in `fxlib.runtime.ops`; how gradients are sent is in `fxlib.runtime.gradients`.
"""
