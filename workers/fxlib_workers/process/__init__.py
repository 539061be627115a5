"""Child processes of a worker: they start with few variables and with limits, and leave nothing behind.

The code that runs in them is in `fxlib_workers.rewrite` and `fxlib_workers.trial`.
"""
