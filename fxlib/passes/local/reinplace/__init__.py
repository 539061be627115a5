"""The pass that lets operators write over arguments that nobody needs any more, and all that shows that nobody does.

Which values may share memory at all is told by `fxlib.analysis.effects.aliases`.
"""
