"""Stores of jobs: the interface, and its implementations in SQL databases.

`lifecycle` decides how a job may change. A store writes each change as a whole, or not at all.
"""
