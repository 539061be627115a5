"""Checks whether two modules are the same program: runs both, compares all effects, and finds what broke it.

Nothing here changes a graph; bounds on single values live in `fxlib.utils.compare`.
"""
