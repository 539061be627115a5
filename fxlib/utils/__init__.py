"""Helpers independent of remote calls: nested containers, plain tensors, comparisons, settings, text, this host.

Nothing here imports the rest of fxlib, except its errors.
"""
