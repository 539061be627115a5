"""Replay: servers of a trial that answer from the job's profile what remote functions of the job's own would answer.

The functions of `fxlib.ps` and of modules that the operator allowed are run, not replayed: see `trial.servers`.
"""
