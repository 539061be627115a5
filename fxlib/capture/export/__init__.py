"""Capture by `torch.export`, with sample inputs, of forwards that decide by sizes, structure and flags.

The result is translated to a graph like that of a trace, so that passes need not know the difference.
"""
