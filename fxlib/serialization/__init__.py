"""Captured modules outside of this process: as files, and as packages that run with torch alone.

The wire format itself lives in `fxlib.wire`.
"""
