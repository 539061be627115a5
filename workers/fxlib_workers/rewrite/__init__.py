"""A rewrite: a process of its own, with limits, decodes one graph and makes candidates of it by the job's recipe.

The passes themselves live in `fxlib.passes`, and whether a candidate is any good is found out in `fxlib_workers.trial`.
"""
