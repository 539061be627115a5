"""What nodes do to the world, what shares memory, and what must stay before what: the one model of legality.

What a single operator does is told by `fxlib.analysis.operators`; what pays is told by `fxlib.analysis.cost`.
"""
