"""How many threads a server gives to calls that came in one message: 13 pushes of `fxlib.ps`, one table each.

A push works on its `keys` rows of 32 floats, after it has waited for `service_ms`. Arms, their blocks in random order
in one process: `fxlib` (`fxlib.batch.run`, which chooses by what it has seen), `one` (one after another), and `all` (a
thread for each call, by `concurrent.futures`). Metric: `ms` for the message, until all are done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from benchmarks.report import Case, Row, main, row
from fxlib import batch, ps
from fxlib.spec.workload import Server, Table

TABLES: Final = tuple(f"table{index}" for index in range(13))
ROWS, DIM = 1000, 32
KEYS, QUICK_KEYS = (16, 128, 512, 2048, 8192), (128, 2048)
SERVICE_MS, QUICK_SERVICE_MS = (0.0, 0.5, 2.0, 10.0), (0.0, 2.0)
ROUNDS, QUICK_ROUNDS = 20, 5
MESSAGES: Final = 5
"""Messages in one block of an arm."""
FIRST: Final = 20
"""Messages of each arm before the first block."""

Calls = Sequence[batch.Call]


def measure(quick: bool) -> Sequence[Row]:
    """Measure each size of pushes with each service time."""
    torch.set_num_threads(1)
    ps.setup(Server(name="ps0", tables=tuple(Table(name=name, rows=ROWS, dim=DIM) for name in TABLES)), seed=0)
    sizes, waits = (QUICK_KEYS, QUICK_SERVICE_MS) if quick else (KEYS, SERVICE_MS)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    return [each for keys in sizes for wait_ms in waits for each in compare(keys, wait_ms, rounds)]


def compare(keys: int, service_ms: float, rounds: int) -> Iterator[Row]:
    """Measure all arms on pushes of one kind."""
    ps.set_service_time(service_ms / 1e3)
    with ThreadPoolExecutor(len(TABLES)) as threads:
        arms: Mapping[str, Callable[[Calls], object]] = {
            "fxlib": batch.run,
            "one": lambda calls: [function(*args) for function, args, _ in calls],
            "all": lambda calls: list(threads.map(lambda call: call[0](*call[1]), calls)),
        }
        order, chance = list(arms), random.Random(0)
        for arm in order:
            milliseconds(arms[arm], keys, FIRST)
        spent: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            chance.shuffle(order)
            for arm in order:
                spent[arm].append(milliseconds(arms[arm], keys, MESSAGES))
    case: Case = {"calls": len(TABLES), "keys": keys, "service_ms": service_ms}
    for arm in arms:
        yield row(benchmark="side_by_side", case=case, arm=arm, metric="ms", unit="ms", samples=spent[arm])


def milliseconds(run: Callable[[Calls], object], keys: int, messages: int) -> float:
    """Return how long a message takes on average."""
    spent = 0.0
    for _ in range(messages):
        calls: list[batch.Call] = [
            (ps.push, (name, torch.randint(ROWS, (keys,)), torch.randn(keys, DIM)), {}) for name in TABLES
        ]
        start = time.perf_counter()
        run(calls)
        spent += time.perf_counter() - start
    return 1e3 * spent / messages


if __name__ == "__main__":
    main("side_by_side", measure, about="Threads of a server for calls that came in one message.")
