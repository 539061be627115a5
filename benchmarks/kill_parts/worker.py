"""`python -m benchmarks.kill_parts.worker`: a worker, by a clock that is set while it runs.

With FXLIB_KILLS_STAND_IN set, its driver runs `benchmarks.kill_parts.trial` in place of trials on Ray; all else of it,
the reaper above the driver and the process that rewrites, is what it always is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from benchmarks.kill_parts import wall_clock

wall_clock.install()

from typing_extensions import override  # noqa: E402 - after the clock

from fxlib_workers import agent  # noqa: E402
from fxlib_workers.__main__ import main  # noqa: E402
from fxlib_workers.process.child import Child  # noqa: E402
from fxlib_workers.trial.driver import TrialDriver  # noqa: E402

STAND_IN: Final = "FXLIB_KILLS_STAND_IN"
"""The environment variable that asks for the stand-in."""

MARK: Final = "FXLIB_KILLS_MARK"
"""The environment variable that all processes of a run inherit."""


class Counted(TrialDriver):
    """A driver that tells that its worker is at work."""

    @override
    def start(self) -> None:
        super().start()
        Path(os.environ["FXLIB_KILLS_UP"]).touch()


class StandIn(Counted):
    """A driver whose process measures nothing."""

    @override
    def start(self) -> None:
        if self._driver is None:
            self._driver = Child("benchmarks.kill_parts.trial", self._root, {}, keep_variables=(MARK,))
            self._ready = False
        super().start()


if __name__ == "__main__":
    vars(agent)["TrialDriver"] = StandIn if os.environ.get(STAND_IN) else Counted
    sys.exit(main())
