"""Capture by symbolic tracing: the tracer, what stands for tensors and results, and what replaces remote calls.

What Python itself is asked for meanwhile is noted by `fxlib.capture.recording`.
"""
