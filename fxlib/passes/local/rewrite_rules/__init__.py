"""The pass that puts rules' replacements in place of their patterns, how it finds these, and where it may replace them.

Rules themselves, as users write them, live in `fxlib.rules`.
"""
