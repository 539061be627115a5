"""Shapes, strides and numbers of dimensions, as the metadata of a graph has them.

Shapes that have to be computed first are `fxlib.inspection.propagate`.
"""
