"""A trial: the user's step, with the original and with each candidate, in processes of its own on Ray.

The candidates are made in `fxlib_workers.rewrite`; remote functions that nobody here has are answered in `replay`, and
`selection` decides which candidate is checked, chosen and adopted.
"""
