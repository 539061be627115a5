"""Passes over remote calls: split, merged, batched, and put into an order in which they overlap.

What a call may do is decided in `fxlib.analysis.effects`, and which order is best in `fxlib.analysis.scheduling`.
"""
