"""Facts about single operators and leaf modules, from torch's schemas and our tables, and about how calls are written.

Nothing here knows a whole graph; `fxlib.analysis.effects` does.
"""
