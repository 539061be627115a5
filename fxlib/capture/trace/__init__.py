"""Capture by symbolic tracing: the tracer, its stand-ins for tensors and results, and its recording of remote calls.

What Python itself is asked for meanwhile is noted by `fxlib.capture.recording`.
"""
