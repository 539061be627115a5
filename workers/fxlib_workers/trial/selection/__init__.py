"""Which candidates of a trial are checked and measured, and which of them is found to be faster than the original.

How a step is run, and in which process, is in `trial` itself.
"""
