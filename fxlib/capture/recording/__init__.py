"""What a forward reads of Python's state while it is captured, and what it leaves behind there.

Whether that is still so is checked at run time, by `fxlib.runtime.guards`.
"""
