"""A rewrite: a separate process with limits decodes one graph and makes candidates from it by the job's recipe.

The passes themselves are in `fxlib.passes`, and `fxlib_workers.trial` finds out whether a candidate is any good.
"""
