"""Whole model zoos through the service: what a manifest lists is captured, measured, kept as a run, and compared.

The command `fxlib zoo` is in `fxlib/cli/zoo.py`; what one model's question is, and how it is asked, is the client's.
"""

from fxlib.zoo.compare import Comparison, compare
from fxlib.zoo.manifest import Entry, Manifest, ManifestError, read_manifest
from fxlib.zoo.runs import Row, Run, Runs

__all__ = [
    "Comparison",
    "Entry",
    "Manifest",
    "ManifestError",
    "Row",
    "Run",
    "Runs",
    "compare",
    "read_manifest",
]
