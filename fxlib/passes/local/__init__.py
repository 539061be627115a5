"""Passes over the trainer's own work; each file holds one pass with the analyses that serve it alone.

Analyses that several passes share live in `fxlib.analysis`.
"""
