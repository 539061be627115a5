"""Costs of nodes, calls, servers and whole steps, measured or estimated, and the bound that no order can beat.

`fxlib.analysis.scheduling` chooses the order.
"""
