"""The order in which remote calls and local work overlap, and the reasons for each call's position.

Nothing here changes a graph; `fxlib.passes.remote` does.
"""
