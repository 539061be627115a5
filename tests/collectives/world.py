"""Two trainers, each a process of its own, that meet in gloo's process groups.

To start a process and import torch takes seconds, so the processes stay for the next test; each has a fresh group.
"""

from __future__ import annotations

import atexit
import queue
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch import distributed as dist

from fxlib.ps.local import end_with_parent
from tests.shared.forked import forks
from tests.shared.process_group import process_group

SIZE = 2


def on_all_ranks(work: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Run `work(*args)` on each rank of a fresh group, and return what each returned, as plain data.

    Raises:
        AssertionError: a rank raised; the message is its traceback.
    """
    if not _waiting:
        _waiting.append(_Ranks())
    ranks = _waiting.pop()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = ranks.run(folder, work, args, timeout_s)
    except BaseException:
        ranks.end()
        raise
    _waiting.append(ranks)
    for rank, (raised, _) in sorted(found.items()):
        assert not raised, f"rank {rank}: {raised}"
    return [found[rank][1] for rank in range(SIZE)]


class _Ranks:
    """The processes, which end with this one at the latest."""

    def __init__(self) -> None:
        context = forks()
        self._answers: Any = context.Queue()
        self._tasks: list[Any] = [context.Queue() for _ in range(SIZE)]
        self._processes: list[ForkServerProcess] = [
            context.Process(target=_serve, args=(rank, tasks, self._answers), daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()
        atexit.register(self.end)

    def run(
        self, folder: str, work: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> dict[int, tuple[str, Any]]:
        """Return by rank the traceback, or "", and what was returned."""
        for tasks in self._tasks:
            tasks.put((folder, work, args))
        try:
            return dict(self._answers.get(timeout=timeout_s) for _ in self._processes)
        except queue.Empty:
            raise AssertionError(f"no answer within {timeout_s} s") from None

    def end(self) -> None:
        atexit.unregister(self.end)
        for process in self._processes:
            process.kill()
            process.join()


_waiting: list[_Ranks] = []


def _serve(rank: int, tasks: Any, answers: Any) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()  # which may be killed, and end nobody
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about the functional collectives that it deprecates
    while True:
        answers.put((rank, _outcome(rank, *tasks.get())))


def _outcome(rank: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    with process_group(folder, rank=rank, size=SIZE):
        dist.barrier()  # a rank that is done at once must not be gone while the others still connect to it
        try:
            return "", work(*args)
        except BaseException:  # noqa: BLE001 - the parent shows it
            return traceback.format_exc(), None
