"""What versions of rows could save where other trainers push: behind a barrier, read all rows, or those that changed.

Two servers, 26 lookups, one message to each, 2 ms for a message. Arms: `all` reads each lookup's rows, as a forward
does. `changed` has the rows with their versions since before, sends the versions with the keys, gets the rows whose
version is another one, and puts them in. `all, stacked` and `changed, stacked` do so with the keys of all lookups in
one tensor, which is the fewest operators and tensors that there can be. Metric: `exposed_seconds` until the rows of all
lookups are there. What it takes to read the rows before the barrier is not counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.distributed import rpc

from benchmarks.report import Row, main, row
from benchmarks.version_parts import servers
from benchmarks.version_parts.servers import ROWS, SERVICE_S
from fxlib import Server, Table, batch, ps
from fxlib.ps.local import local

LOOKUPS, SERVERS, DIM = 13, 2, 64
"""Number of lookups on each server, of servers, and of elements of a row."""
KEYS: Final = (128, 512, 2048)
"""Number of keys of a lookup."""
SHARES: Final = (0.0, 0.1, 0.5, 0.9)
"""Shares of the rows that others have changed since they were read."""
ROUNDS, QUICK_ROUNDS = 31, 5


class Reader:
    """Reads for one batch.

    Attributes:
        keys: for each server, the keys of each lookup.
    """

    def __init__(self, count: int) -> None:
        self.keys = [[torch.randperm(ROWS)[:count] for _ in range(LOOKUPS)] for _ in range(SERVERS)]
        self._stacked = [torch.cat([key + i * ROWS for i, key in enumerate(keys)]) for keys in self.keys]
        self._count = count

    def all_rows(self) -> list[torch.Tensor]:
        """Read the rows of each lookup as fxlib sends such reads."""
        calls: list[Any] = [[(ps.lookup, (f"table{i}", key), {}) for i, key in enumerate(keys)] for keys in self.keys]
        found = _ask(batch.run_batched, [(ps.lookup_many, each) for each in calls])
        return [each for rows in found for each in rows]

    def all_stacked(self) -> list[torch.Tensor]:
        """Read the rows of all lookups in one tensor."""
        return [
            each
            for rows in _ask(servers.read_all, [(keys,) for keys in self._stacked])
            for each in rows.split(self._count)
        ]

    def known(self, share: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return rows with versions, read before others have changed a share of them."""
        found: list[Any] = _ask(servers.read_known, [(keys,) for keys in self._stacked])
        if share:
            _ask(servers.touch, [(keys[torch.rand(len(keys)) < share],) for keys in self._stacked])
        return found

    def changed(self, known: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Read for each lookup the rows that have changed, and put them in."""
        before = [list(zip(*(each.split(self._count) for each in pair), strict=True)) for pair in known]
        calls: list[Any] = [
            [(i, key, versions) for i, (key, (_, versions)) in enumerate(zip(keys, pairs, strict=True))]
            for keys, pairs in zip(self.keys, before, strict=True)
        ]
        found = _ask(servers.read_changed_many, [(each,) for each in calls])
        pairs = (
            (answer, rows)
            for answers, each in zip(found, before, strict=True)
            for answer, (rows, _) in zip(answers, each, strict=True)
        )
        return [rows.index_copy(0, at, new) if len(at) else rows for (at, new, _), rows in pairs]

    def changed_stacked(self, known: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Do so with the keys of all lookups in one tensor."""
        given = [(keys, versions) for keys, (_, versions) in zip(self._stacked, known, strict=True)]
        found = _ask(servers.read_changed, given)
        whole = [rows.index_copy(0, at, new) for (at, new, _), (rows, _) in zip(found, known, strict=True)]
        return [each for rows in whole for each in rows.split(self._count)]


def _ask(function: Callable[..., Any], of_servers: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function of each server at once, and return the answers."""
    flying = [rpc.rpc_async(f"ps{i}", function, args=args) for i, args in enumerate(of_servers)]
    return [each.wait() for each in flying]


def measure(quick: bool) -> Sequence[Row]:
    """Measure all cases against the same servers."""
    torch.set_num_threads(1)
    tables = tuple(Table(name=f"table{i}", rows=ROWS, dim=DIM) for i in range(LOOKUPS))
    with local([Server(name=f"ps{rank}", tables=tables) for rank in range(SERVERS)]):
        _ask(servers.prepare, [()] * SERVERS)
        _ask(ps.set_service_time, [(SERVICE_S, "call")] * SERVERS)
        return [each for count in KEYS for each in compare(count, QUICK_ROUNDS if quick else ROUNDS)]


def compare(count: int, rounds: int) -> Iterator[Row]:
    """Measure all arms with this many keys in each lookup, in random order."""
    reader, took, chance = Reader(count), dict[tuple[str, float], list[float]](), random.Random(0)
    assert all(map(torch.equal, reader.all_rows(), reader.changed(reader.known(0.5))))
    assert all(map(torch.equal, reader.all_stacked(), reader.changed_stacked(reader.known(0.5))))
    anew = {"all": reader.all_rows, "all, stacked": reader.all_stacked}
    again = {"changed": reader.changed, "changed, stacked": reader.changed_stacked}
    arms = [*((arm, 0.0) for arm in anew), *((arm, share) for arm in again for share in SHARES)]
    for _ in range(rounds):
        chance.shuffle(arms)
        for arm, share in arms:
            read = anew[arm] if arm in anew else partial(again[arm], reader.known(share))
            start = time.perf_counter()
            read()
            took.setdefault((arm, share), []).append(time.perf_counter() - start)
    mb = SERVERS * LOOKUPS * count * DIM * 4 / 1e6
    for (arm, share), samples in sorted(took.items()):
        case = {"keys": count, "MB": round(mb, 1), "changed": share}
        yield row(benchmark="row_versions", case=case, arm=arm, metric="exposed_seconds", unit="s", samples=samples)


if __name__ == "__main__":
    main("row_versions", measure, about="What reading only changed rows could save.")
