"""A worker claims jobs of the service, rewrites their graphs in a sandboxed process, and measures them on Ray.

What the graphs, passes and reports are is defined in `fxlib`; the worker knows the service only through the protocol.
"""
