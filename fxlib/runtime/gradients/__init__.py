"""Gradients of remote results on the trainer: how autograd hands them over, and how they are pushed.

What a user calls is `fxlib.runtime.push_gradients`; what a server does with a gradient is not here.
"""
