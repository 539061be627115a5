"""Replay: remote functions that a worker does not have, answered from a profile."""
