"""The pass that lets convolutional nets work channels last, and where that may begin and end.

How values lie in memory in general is told by `fxlib.analysis.operators.layouts`.
"""
