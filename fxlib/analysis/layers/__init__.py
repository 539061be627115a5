"""What a graph's layers are: linear ones and convolutions, the weights that keep through a forward, ranks of values.

It is what passes for inference share. What one operator does is told by `fxlib.analysis.operators`.
"""
