"""Child processes of a worker: started with few variables and with limits, and ended without a trace.

What runs in them lives in `fxlib_workers.rewrite` and `fxlib_workers.trial`.
"""
