"""The pass that computes once what every forward would compute alike, and which values these are.

Which weights keep through a forward is told by `fxlib.analysis.layers.constant_weights`.
"""
