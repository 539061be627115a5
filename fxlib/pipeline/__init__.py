"""Make calls across the step: the next batches' reads travel while the current one trains, with the same bits.

`fxlib.analysis.effects.prologue` decides which calls may run ahead. This package has the loop over a loader, the calls
that were made ahead, and the watch over the writes in between.
"""

from fxlib.pipeline.declared_keys import check_keys
from fxlib.pipeline.loop import Pipeline, pipeline
from fxlib.pipeline.module_ahead import prefetch

__all__ = ["Pipeline", "check_keys", "pipeline", "prefetch"]
