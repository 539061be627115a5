"""Every part of fxlib killed at random, with full disks and a clock that is set: what is lost, doubled or leaked.

A real service (SQLite and blobs in a folder), two real workers and two real launchers run as processes; launchers ask
one question after another, each to be measured anew. At random moments a process of a random part gets SIGKILL: the
service, a worker, a launcher, a reaper, the process that rewrites, the one that forks those, the one that drives
trials, and on Ray a trainer, a server or a raylet; who ended is started again. In between, the disk of the service or
of the workers (small ones of their own, mounted where this user may) is filled for some seconds, and the wall clock
that all parts read is set by up to 400 days, forward or back.

Case `{trials}`: `stand-in`, a trial that takes a second and measures nothing, so that hundreds of kills meet every
moment of a job, or `ray`, real trials. Arms: `killed`, how often each part was; `found`, what was left. `lost` are
requests that have no job or whose job did not end with an answer; `doubled` are jobs beyond one for a request, and ends
beyond one for a job; `given_up` are jobs that failed with WORKER_LOST, as the service says of a job whose workers were
lost three times in a row; `unmeasured` have an answer that says that their trial's processes were killed too often.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.kill_parts.world import Faults, Findings, world
from benchmarks.report import Case, Row, line

COUNT: Final = 200
RAY_COUNT: Final = 20
QUICK_COUNT: Final = 10

_KILLS_PER_JOB: Final = 3.0
"""The mean number of kills in the time that a job takes while nothing is killed, whatever the machine's speed."""
_LEAST_PAUSE_S: Final = 5.0
"""The least mean pause between kills, in seconds: with less, what was killed has hardly started again, and no job goes
on."""
_FIRST_S: Final = 600.0
_SETTLE_S: Final = 900.0
_FULL_S: Final = (1.0, 8.0)
_OFTEN: Final = 0.25


def measure(trials: str, count: int, seed: int, keep: Path | None = None) -> Sequence[Row]:
    """Kill so many processes, let all that was asked end, and count what is left."""
    chance, began = random.Random(seed), time.monotonic()
    with world(stand_in=trials == "stand-in", seed=seed, folder=keep and keep / trials) as made:
        pause_s = max(made.first_job_s(_FIRST_S) / _KILLS_PER_JOB, _LEAST_PAUSE_S)
        for _ in range(count):
            if chance.random() < _OFTEN:
                made.fill_a_disk(chance.uniform(*_FULL_S))
            if chance.random() < _OFTEN:
                made.set_the_clock()
            made.wait(chance.uniform(0.0, 2 * pause_s))
            made.kill_one()
        made.settle(_SETTLE_S)
        return rows({"trials": trials, "kills": count}, made.faults, made.findings(), time.monotonic() - began)


def rows(case: Case, faults: Faults, found: Findings, seconds: float) -> list[Row]:
    """Return a run as rows: counts, which have no interval."""
    counts = [("killed", part, number) for part, number in sorted(faults.kills.items())]
    counts += [
        ("done", "disks_filled", faults.disks),
        ("done", "clock_set", faults.jumps),
        ("done", "seconds", round(seconds)),
    ]
    counts += [("found", name, number) for name, number in asdict(found).items()]
    return [
        Row(
            benchmark="kills",
            case=case,
            arm=arm,
            metric=metric.replace(" ", "_"),
            value=value,
            unit="count",
            low=value,
            high=value,
            runs=1,
        )
        for arm, metric, value in counts
    ]


def main() -> int:
    """Run the cases asked for; return 1 if anything was lost, doubled or leaked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, as one JSON list")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_COUNT} kills, and none on Ray")
    parser.add_argument(
        "--count", type=int, default=COUNT, help="kills with a stand-in for trials (default: %(default)s)"
    )
    parser.add_argument("--ray", type=int, default=RAY_COUNT, help="kills with real trials (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs of all parts here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    counts = {"stand-in": options.count, "ray": options.ray}
    if options.quick:
        counts = {"stand-in": QUICK_COUNT, "ray": 0}
    measured = [
        row for trials, count in counts.items() if count for row in measure(trials, count, options.seed, options.keep)
    ]
    for each in measured:
        print(line(each))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")
    harm = {"lost", "doubled", "leaked_leases", "leaked_processes", "leaked_files"}
    return int(any(each.value for each in measured if each.metric in harm))


if __name__ == "__main__":
    raise SystemExit(main())
