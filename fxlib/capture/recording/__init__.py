"""Recording of the Python state that a forward reads, and of the changes that it makes, while it is captured.

The checks before each run that the state is still the same are in `fxlib.runtime.guards`.
"""
