"""Passes over remote calls: split, merged, batched, and put into an order in which they overlap.

`fxlib.analysis.effects` decides what a call may do, and `fxlib.analysis.scheduling` which order is best.
"""
