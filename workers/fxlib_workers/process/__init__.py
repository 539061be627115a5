"""Processes that leave nothing behind.

What runs in them lives in `fxlib_workers.rewrite` and `fxlib_workers.trial`.
"""
