"""The effects of nodes, the memory they share, and the order they must keep: the one model of legality.

`fxlib.analysis.operators` describes single operators; `fxlib.analysis.cost` estimates what a change gains.
"""
