"""What nodes, calls, servers and whole steps take, measured or estimated, and the bound that no order can beat.

Which order to choose is decided in `fxlib.analysis.scheduling`.
"""
