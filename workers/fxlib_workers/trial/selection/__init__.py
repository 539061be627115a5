"""Which candidates of a trial are compared, in how many steps, and which of them is found to be faster.

How a step is run, and where, is in `trial` itself.
"""
