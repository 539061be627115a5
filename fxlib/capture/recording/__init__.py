"""Recording of the Python state that a forward reads, and of the changes that it makes, while it is captured.

`fxlib.runtime.guards` checks before each run that this state is still the same.
"""
