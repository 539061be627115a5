"""What fuzzing has read: every parser on both sides, on inputs that coverage guides (`make fuzz`).

Case `{parser}`, a target of `tests.fuzz`; arms `guided` (the runs whose counts are kept in `build/fuzz`) and metrics
`inputs`, `kept` (inputs that reached code that no other one reached) and `findings` (inputs that did what none may do,
or were refused by an exception that nobody promised). The case `{parser: all}` adds them up. Nothing is fuzzed here:
the figures are those of earlier runs in this folder, and there are none without such runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from benchmarks.report import Row, main, row
from tests.fuzz.__main__ import FOLDER, NAMES


def measure(quick: bool) -> Sequence[Row]:
    """Add up what runs have left behind, quick or not."""
    del quick
    counts = FOLDER / "counts.json"
    told = json.loads(counts.read_text()) if counts.exists() else {}
    found = {name: figures(name, inputs) for name in NAMES if (inputs := told.get(name, 0))}
    if found:
        found["all"] = [sum(each) for each in zip(*found.values(), strict=True)]
    return [each for name, values in found.items() for each in rows(name, values)]


def figures(name: str, inputs: int) -> Sequence[int]:
    """Return the inputs that a target has read, those that were kept, and its findings."""
    kept = len(list((FOLDER / "corpus" / name).glob("*")))
    return inputs, kept, sum(each.name.rsplit("-", 2)[0] == name for each in (FOLDER / "findings").glob("*"))


def rows(name: str, values: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of one target."""
    for metric, value in zip(("inputs", "kept", "findings"), values, strict=True):
        yield row(
            benchmark="fuzz",
            case={"parser": name},
            arm="guided",
            metric=metric,
            unit="",
            samples=[float(value)],
        )


if __name__ == "__main__":
    main("fuzz", measure, about="Inputs that fuzzing has read, by parser.")
