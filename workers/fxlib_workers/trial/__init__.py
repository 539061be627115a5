"""A trial: it runs the user's step, with the original and with each candidate, in separate processes on Ray.

`fxlib_workers.rewrite` makes the candidates, `replay` answers remote functions that no process here has, and
`selection` decides which candidate is checked, chosen and adopted.
"""
