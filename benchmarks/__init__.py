"""Measurements, side by side in one run; each `python -m benchmarks.NAME --json FILE [--quick]`."""
