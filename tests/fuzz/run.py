"""Fuzzes one target in this process: `python -m tests.fuzz.run TARGET SEEDS CORPUS [libFuzzer's options]`, for ever.

The inputs to begin with are written to the folder SEEDS. libFuzzer keeps an input that reaches new code in CORPUS, and
ends this process at the first finding, which it writes to a file.
"""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path

import atheris
import torch  # its own code is not instrumented: what is looked for is new code of fxlib

SOURCES = ["fxlib", "fxlib_service", "fxlib_workers"]
_BYTES = 0.25
"""The share of inputs that libFuzzer itself changes, byte by byte and with its table of comparisons."""


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer ends."""
    with atheris.instrument_imports(include=SOURCES, enable_loader_override=False):
        from tests.fuzz.oracles import Watch, attempt
        from tests.fuzz.targets import TARGETS
    target, folder = TARGETS[arguments.pop(1)], Path(arguments.pop(1))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    watch = Watch()
    seeds = list(target.seeds())
    for number, seed in enumerate(seeds):  # what is imported at the first use is there from now on
        (folder / str(number)).write_bytes(seed)
        try:
            target.read(seed)
        except target.refusals:
            continue

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < _BYTES:
            changed: bytes = atheris.Mutate(data, max_size)
            return changed
        return target.mutated(data, rng, rng.choice(seeds))[:max_size]

    def read(data: bytes) -> None:
        attempt(target.read, data, target.refusals, watch)

    atheris.Setup([*arguments, str(folder)], read, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
