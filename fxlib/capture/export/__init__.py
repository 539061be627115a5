"""Capture by `torch.export`, on sample inputs, for forwards that decide by sizes, structure and flags.

The result is translated to a graph such as tracing makes, so that passes need not know the difference.
"""
