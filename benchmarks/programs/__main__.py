"""Public parameter-server programs, unmodified, through service, worker and trial, in launchers of their own.

Their sources are not part of this repository: `--sources` names a folder with copies of them, in whichever layout
(pytorch/examples, pytorch/tutorials, pytorch/pytorch; a DLRM over RPC). Each program runs with real servers that take
so many milliseconds for each call of its own, and is captured, profiled, optimized with that profile from which the
trial replays, and raced in its own launcher, blocks interleaved. What a program wraps into DistributedDataParallel is
wrapped without the devices that it names, on two launchers. Arms: `original`, `fxlib` (what the service gave back)
and, where a program makes more than one independent call, `hand` (an expert's forward) and `unprofiled` (the schedule
that is made without a profile). Metrics: `captured`, `adopted` and `bitwise` (1 or 0: outputs, loss and gradients, here
and on the servers), `decided_seconds` (how long the launcher waited for the service's answer), `step_seconds`, the
`gain` over the original; of `ARM/hand` the ratio of their speeds. Of
`predicted ARM/measured` and `bound/measured`, `seconds`: how the cost model's step, by the profile, and its bound stand
beside the measured one; a bound is at most 1. `busy_cores` is the share of the machine's cores that launchers and
servers kept busy: where it is near 1, the cores are what an arm waits for. A prediction is no shorter than what the
profiled steps took of the cores; a bound is made for servers with hosts of their own. A case says why it was not
adopted. With `loop` "evaluation", a case is a loop over 24 batches without gradients, whose servers draw no random
numbers: `original`, `fxlib` (the schedule for forwards alone) and `pipeline`, the same under `fxlib.pipeline`; `taken`
is the share of calls whose results were there when their forward came; in some steps the loop tries to do without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from benchmarks.programs.case import ORIGINAL, Asked, Found
from benchmarks.programs.catalogue import PROGRAMS
from benchmarks.programs.evaluation import Evaluated
from benchmarks.report import Case, Row, line, ratio_interval, row
from examples.service import service

NAME: Final = "programs"
SERVICE_MS: Final = (2.0, 10.0)
TIMEOUT_S: Final = 600.0
_WORDS: Final = 160


def found(asked: Asked) -> Found:
    """Run one case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fxlib-program-") as folder:
        command = [sys.executable, "-m", "benchmarks.programs.case", json.dumps(asdict(replace(asked, folder=folder)))]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
            told = json.loads(done.stdout.splitlines()[-1])
            return Found(**told | {"evaluation": told["evaluation"] and Evaluated(**told["evaluation"])})
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
            return Found(why=f"the launcher did not end well: {type(error).__name__}")


def rows(name: str, service_ms: float, came: Found) -> Iterator[Row]:
    """Sum one case up."""
    case: Case = {"program": name, "service_ms": service_ms}
    if came.why:
        case = {**case, "why": " ".join(came.why.split())[:_WORDS]}
    flags = {"captured": came.captured, "adopted": came.adopted, "bitwise": came.bitwise}
    for metric, flag in flags.items():
        if flag is not None:
            yield _single(case, "fxlib", metric, float(flag))
    if came.asked_s:
        yield _single(case, "fxlib", "decided_seconds", came.asked_s, unit="s")
    for arm, seconds in came.seconds.items():
        yield row(benchmark=NAME, case=case, arm=arm, metric="step_seconds", unit="s", samples=seconds)
    for arm, share in came.busy.items():
        yield _single(case, arm, "busy_cores", share)
    for arm, predicted_s in came.predicted_s.items():
        if arm in came.seconds:
            off, low, high = ratio_interval([predicted_s] * len(came.seconds[arm]), came.seconds[arm])
            yield _ratio(case, f"predicted {arm}/measured", "seconds", (off, low, high), came.seconds[arm])
    if came.bound_s is not None and "fxlib" in came.seconds:
        off, low, high = ratio_interval([came.bound_s] * len(came.seconds["fxlib"]), came.seconds["fxlib"])
        yield _ratio(case, "bound/measured", "seconds", (off, low, high), came.seconds["fxlib"])
    if came.evaluation is not None:
        yield from _of_evaluation({**case, "loop": "evaluation"}, came.evaluation)
    pairs = [(ORIGINAL, arm) for arm in came.seconds if arm != ORIGINAL]
    pairs += [("hand", arm) for arm in ("fxlib", "unprofiled") if {"hand", arm} <= came.seconds.keys()]
    for above, below in pairs:
        ratio = ratio_interval(came.seconds[above], came.seconds[below])
        arm, metric = (below, "gain") if above == ORIGINAL else (f"{below}/{above}", "speed")
        yield _ratio(case, arm, metric, ratio, came.seconds[above])


def _of_evaluation(case: Case, came: Evaluated) -> Iterator[Row]:
    for metric, value in (("bitwise", float(came.bitwise)), ("taken", came.taken)):
        yield _single(case, "pipeline", metric, value)
    for arm, seconds in came.seconds.items():
        yield row(benchmark=NAME, case=case, arm=arm, metric="step_seconds", unit="s", samples=seconds)
        if arm != ORIGINAL:
            ratio = ratio_interval(came.seconds[ORIGINAL], seconds)
            yield _ratio(case, arm, "gain", ratio, seconds)


def _single(case: Case, arm: str, metric: str, value: float, unit: str = "") -> Row:
    return Row(benchmark=NAME, case=case, arm=arm, metric=metric, value=value, unit=unit, low=value, high=value, runs=1)


def _ratio(case: Case, arm: str, metric: str, ratio: tuple[float, float, float], samples: Sequence[float]) -> Row:
    value, low, high = ratio
    return Row(
        benchmark=NAME,
        case=case,
        arm=arm,
        metric=metric,
        value=value,
        unit="times",
        low=low,
        high=high,
        runs=len(samples),
    )


def main() -> None:
    """Run all programs, or those that are named; print rows as they come, and write them to `--json FILE`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(each.name for each in PROGRAMS)}")
    parser.add_argument("--sources", type=Path, required=True, metavar="DIR", help="copies of the programs' sources")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, as one JSON list")
    parser.add_argument("--quick", action="store_true", help="servers of 10 ms alone, and shorter measurements")
    options = parser.parse_args()
    measured: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fxlib-programs-") as folder, service(Path(folder)) as address:
        for name in options.names or [each.name for each in PROGRAMS]:
            for service_ms in SERVICE_MS[-1:] if options.quick else SERVICE_MS:
                asked = Asked(
                    name=name,
                    sources=str(options.sources.resolve()),
                    service_ms=service_ms,
                    address=address,
                    folder="",
                    quick=options.quick,
                )
                for each in rows(name, service_ms, found(asked)):
                    print(line(each), flush=True)
                    measured.append(each)
                if options.json is not None:  # what is there counts, should a later program never end
                    options.json.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
