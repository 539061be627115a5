"""The conditions of a graph, checked before each run: facts of Python, inputs, weights, backward order.

`fxlib.capture` notes the facts of a capture; `fxlib.runtime.module` decides what happens when a check fails.
"""
