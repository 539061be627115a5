"""The pass that runs layers on int8 weights, and the plan that lets values stay integers from one layer to the next.

The operators that it puts in the place of layers live in `fxlib.runtime.int8`.
"""
