"""What one forward notes as it runs: remote results that take a gradient, whose these are, and what is in flight.

What operators do is in `fxlib.runtime.ops`; how a gradient that has come is sent is in `fxlib.runtime.gradients`.
"""
