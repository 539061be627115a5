"""Processes that leave nothing behind.

What runs in them lives in `workers.sandbox` and `workers.trial`.
"""
