"""The pass that lets operators overwrite arguments that are no longer needed, and the analysis that proves it.

`fxlib.analysis.effects.aliases` says which values may share memory at all.
"""
