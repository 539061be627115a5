"""Try every operator out of bounds, and write what may travel: `python -m benchmarks.out_of_bounds`.

Takes half an hour on two idle cores, a part of it to collect the samples, which `--samples FILE` keeps. `--trials FILE`
keeps what became of the calls, and operators that it holds are tried only with `--again`: then all runs count, and one
that left its tensors once may not travel, whatever later runs find. `--only TEXT,TEXT` tries those whose names hold a
text. `--write` puts the table in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.out_of_bounds.samples import Samples, collect
from benchmarks.out_of_bounds.table import build, candidates, written
from benchmarks.out_of_bounds.trials import Trial, preload, run
from fxlib.wire.memory_safety import TABLE


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=Path, default=Path("build/out_of_bounds.jsonl"), metavar="FILE")
    parser.add_argument("--samples", type=Path, metavar="FILE")
    parser.add_argument("--count", type=int, default=160, help="calls of each operator with something out of bounds")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--names", type=Path, metavar="FILE", help="try those in the file")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if "guarded_memory" not in os.environ.get("LD_PRELOAD", ""):
        os.execvpe(sys.executable, [sys.executable, "-m", "benchmarks.out_of_bounds", *sys.argv[1:]], preload())  # noqa: S606 - itself
    torch.set_num_threads(1)
    options.trials.parent.mkdir(parents=True, exist_ok=True)
    earlier = read(options.trials)
    ran = set() if options.again else {each.name for each in earlier}
    names = [name for name in candidates() if any(each in name for each in options.only.split(",")) and name not in ran]
    if options.names:
        names = [name for name in options.names.read_text().split() if name not in ran]
    if options.count:
        try_all(names, kept(options.samples, options.only.split(",")), options.count, options.jobs, options.trials)
    table = build(read(options.trials))
    print({kind: len(found) for kind, found in table.items() if isinstance(found, (list, dict))}, table["calls"])
    if options.write:
        TABLE.write_text(written(table))


def kept(file: Path | None, texts: Sequence[str]) -> Samples:
    """Return the samples of a file, or collect those of such names, into the file if one is given."""
    if file is not None and file.exists():
        return torch.load(file, weights_only=False)
    samples = collect(lambda name: any(text in name or name in text for text in texts))
    if file is not None:
        samples.drop_unpicklable()
        torch.save(samples, file)
    return samples


def read(file: Path) -> list[Trial]:
    """Return the trials of a file, if there is one."""
    return [Trial(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def try_all(names: Sequence[str], samples: Samples, count: int, jobs: int, file: Path) -> None:
    """Try the names in processes beside each other, and add what became of them to the file."""

    def report(trial: Trial) -> None:
        with file.open("a") as out:
            out.write(json.dumps(asdict(trial)) + "\n")

    children = []
    for job in range(jobs):
        if not (pid := os.fork()):
            status = 1
            try:
                run(names[job::jobs], samples, count, report)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    assert not failed, "a process of the trial failed"


if __name__ == "__main__":
    main()
