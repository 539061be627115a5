"""Decides which candidates of a trial are checked and measured, and which one is faster than the original.

`trial` itself has the running of steps in processes.
"""
