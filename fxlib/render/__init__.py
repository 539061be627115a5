"""Reports and timelines as pages that people read.

The figures come from `fxlib.spec.report`; graphs are drawn by `fxlib.inspection`.
"""
