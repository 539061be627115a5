"""Named lists of passes, and the variants of them that a worker tries.

The passes themselves live in `fxlib.passes`.
"""
