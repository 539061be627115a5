"""Fuzz every parser with coverage guidance: `make fuzz`, or `python -m tests.fuzz [TARGET...] [--seconds SECONDS]`.

Each target runs in a process of its own, one after the other, on top of what earlier runs kept in `build/fuzz/corpus`.
An input with a finding is kept in `build/fuzz/findings`, and makes the command fail; the end of the target's log beside
it says what was found. `build/fuzz/counts.json` adds up the inputs of all runs. With `--lines` nothing is fuzzed: the
corpora are read once more, and what they reach of each file is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxlib.utils.text import table

FOLDER = Path("build/fuzz")
NAMES = (
    *("graphs", "answers", "messages", "recipes", "requests", "weights", "batches", "graph-files", "profile-files"),
    *("device-files", "policy-files", "serve-settings", "worker-settings", "token-files", "headers", "refusals"),
    *("arguments", "lines", "trial-answers", "fork-messages", "model-lines", "manifests", "rows", "table-files"),
    "visits",
)
"""The targets' names, which are known before torch is imported; a test holds them to the targets."""
_LONGEST = 65_536
_INPUT_S = 60
_MEMORY_MIB = 6_144


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of one run."""

    name: str
    inputs: int
    seconds: float
    coverage: int
    kept: int
    finding: str


def main(arguments: Sequence[str]) -> int:
    """Fuzz the targets named, or all of them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*NAMES, []], metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=float, default=180.0, help="time for all targets together (180)")
    parser.add_argument("--lines", action="store_true", help="print what the corpora reach, and fuzz nothing")
    options = parser.parse_args(arguments)
    names = options.targets or NAMES
    if options.lines:
        from tests.fuzz.lines import report

        print("\n".join(report(FOLDER / "corpus", names)))
        return 0
    if importlib.util.find_spec("atheris") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"fuzzing: skipped (atheris is not there; it has wheels for Python 3.11 to 3.13, and this is {version})")
        return 0
    runs = []
    for name in names:
        runs.append(fuzz(name, options.seconds / len(names)))
        print(_line(runs[-1]), flush=True)
    print("\n".join(["", *_summary(runs), f"{_add_up(runs):,} inputs in all runs so far ({FOLDER}/counts.json)"]))
    return 1 if any(run.finding for run in runs) else 0


def fuzz(name: str, seconds: float) -> Run:
    """Fuzz one target for so long, or up to its first finding."""
    corpus, findings, log = FOLDER / "corpus" / name, FOLDER / "findings", FOLDER / f"{name}.log"
    seeds = FOLDER / "seeds" / name
    for folder in (corpus, seeds, findings):
        folder.mkdir(parents=True, exist_ok=True)
    began_s, before = time.time(), set(findings.iterdir())
    command = [sys.executable, "-m", "tests.fuzz.run", name, str(seeds), str(corpus)]
    command += [
        f"-max_total_time={seconds:.0f}",
        f"-max_len={_LONGEST}",
        f"-timeout={_INPUT_S}",
        f"-report_slow_units={_INPUT_S}",  # by the clock on the wall; the oracle counts processor time
        "-print_final_stats=1",
    ]
    command += [f"-rss_limit_mb={_MEMORY_MIB}", f"-artifact_prefix={findings}/{name}-", "-verbosity=1"]
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    found = sorted(str(path) for path in set(findings.iterdir()) - before)
    if status and not found:
        found = [str(log)]
    return Run(
        name=name,
        inputs=_last(r"number_of_executed_units: (\d+)", text) or _last(r"#(\d+)", text),
        seconds=time.time() - began_s,
        coverage=_last(r"cov: (\d+)", text),
        kept=len(list(corpus.iterdir())),
        finding=", ".join(found),
    )


def _last(pattern: str, text: str) -> int:
    return int((re.findall(pattern, text) or ["0"])[-1])


def _line(run: Run) -> str:
    found = f"  FOUND {run.finding} (see {FOLDER}/{run.name}.log)" if run.finding else ""
    return f"{run.name}: {run.inputs:,} inputs in {run.seconds:.0f} s, {run.kept:,} kept{found}"


def _summary(runs: Sequence[Run]) -> list[str]:
    rows = [[run.name, f"{run.inputs:,}", f"{run.coverage:,}", f"{run.kept:,}", run.finding] for run in runs]
    total = ["all", f"{sum(run.inputs for run in runs):,}", "", "", f"{sum(bool(run.finding) for run in runs)}"]
    return table([["target", "inputs", "branches", "kept", "findings"], *rows, total], right=(1, 2, 3), indent="")


def _add_up(runs: Sequence[Run]) -> int:
    """Add the inputs of these runs to those of earlier ones, and return the sum."""
    path = FOLDER / "counts.json"
    counts: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    for run in runs:
        counts[run.name] = counts.get(run.name, 0) + run.inputs
    path.write_text(json.dumps(counts, indent=2) + "\n")
    return sum(counts.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
