"""The pass that puts what an operator is made of in its place, and the decompositions known by name.

Rules with patterns of several nodes live in `fxlib.rules`.
"""
