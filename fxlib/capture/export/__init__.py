"""Capture by `torch.export`, on sample inputs, for forwards that decide by sizes, structure and flags.

The result is translated to the graph that tracing makes; passes never see the difference.
"""
