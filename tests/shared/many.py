"""How many random programs a suite of many runs; `FXLIB_PROGRAMS=2000`, by hand, runs more."""

import os

MANY = int(os.environ.get("FXLIB_PROGRAMS", "250"))
"""Bugs that are planted have to show within so many. It is even."""
