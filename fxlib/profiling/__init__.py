"""Measured steps of a program as a `fxlib.spec.profile.Profile`: how they are taken, saved and described.

What a plan makes of a profile is decided in `fxlib.analysis.cost`.
"""

from fxlib.profiling.file import load_profile, save_profile
from fxlib.profiling.live_profile import profile
from fxlib.profiling.measure import measure

__all__ = ["load_profile", "measure", "profile", "save_profile"]
