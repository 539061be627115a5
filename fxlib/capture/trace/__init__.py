"""Capture by symbolic tracing: the tracer, its stand-ins for tensors and results, and its recording of remote calls.

`fxlib.capture.recording` records what Python itself is asked meanwhile.
"""
