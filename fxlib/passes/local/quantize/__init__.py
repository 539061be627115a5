"""The pass that runs layers on int8 weights, and the plan that lets values stay integers from one layer to the next.

The operators that replace the layers are in `fxlib.runtime.int8`.
"""
