"""What a graph takes for granted, checked before each run: facts of Python, inputs, weights, backward order.

What a capture notes is made in `fxlib.capture`; what happens when a check fails is decided in `fxlib.runtime.module`.
"""
