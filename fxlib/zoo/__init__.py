"""Send whole model zoos through the service: a manifest's models are captured, measured, kept as a run, and compared.

The command `fxlib zoo` is in `fxlib/cli/zoo.py`; the client decides what one model's question is, and how to ask it.
"""

from fxlib.zoo.compare_runs import Comparison, compare
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
