"""A stand-in for trials on Ray: it speaks with the worker as they do, takes a second, and adopts the first candidate.

It measures nothing: its figures are made up, and only the worker and the service that carry them are on trial.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from fxlib.reasons import Reason
from fxlib.spec.report import Estimate
from fxlib_workers.exchange import JobFolder
from fxlib_workers.process.child import FOLDER, Channel, ChildEndedError

_STEPS: Final = 10
_STEP_S: Final = 0.1


def main() -> int:
    """Answer until the worker ends."""
    channel = Channel.inherited()
    os.environ.pop(FOLDER)
    try:
        channel.send(ready=True)
        while True:
            message = channel.receive()
            if message is not None and "folder" in message:
                _run(JobFolder(Path(message["folder"])), channel)
    except ChildEndedError:
        return 0


def _run(folder: JobFolder, channel: Channel) -> None:
    for step in range(_STEPS):
        if channel.receive(timeout_s=0.0) is not None:
            channel.send(interrupted=True)
            return
        channel.send(phase="qps", message="made up", progress=step / _STEPS)
        time.sleep(_STEP_S)
    folder.choose(folder.candidates()[0])
    report = replace(
        folder.read_rewrite(),
        decision="adopt",
        reason=Reason.FASTER,
        explanation=Reason.FASTER.sentence(""),
        qps_original=Estimate(value=100.0, low=99.0, high=101.0),
        qps_optimized=Estimate(value=150.0, low=149.0, high=151.0),
        gain=Estimate(value=0.5, low=0.49, high=0.51),
    )
    folder.write_report(report)
    channel.send(done=True)


if __name__ == "__main__":
    sys.exit(main())
