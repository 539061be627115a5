"""Whether two modules are the same program: run both, compare all that they leave behind, and find what broke it.

Nothing here changes a graph; bounds on single values live in `fxlib.utils.compare`.
"""
