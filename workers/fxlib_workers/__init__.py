"""A worker claims jobs of the service, rewrites their graphs in a sandboxed process, and measures them on Ray.

`fxlib` defines graphs, passes and reports. The worker knows the service only through the protocol.
"""
