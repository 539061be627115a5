"""The order in which remote calls and local work overlap, and the reasons why a call stands where it stands.

Nothing here changes a graph: `fxlib.passes.remote` does.
"""
