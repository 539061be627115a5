"""Replay: servers of a trial that answer, from the job's profile, in place of the job's own remote functions.

The functions of `fxlib.ps` and of modules that the operator allows are run, not replayed; see `trial.server_state`.
"""
