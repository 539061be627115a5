"""Gradients of remote results on the trainer: how autograd hands them over, and how they are pushed.

Users call `fxlib.runtime.push_gradients`; how a server applies a gradient is not in this folder.
"""
