"""A rendezvous for the ranks of a process group: what one of them writes, all can read.

It uses the key-value store in which the ranks have met. So it needs no particular backend, and no collective, which a
training loop would have to order among its own. Only bytes are written; nothing is pickled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from torch import distributed as dist

from fxlib.client.deadline import Deadline
from fxlib.errors import RemoteError, WorkloadError

Group: TypeAlias = "dist.ProcessGroup | Literal['world']"
_CHUNK_BYTES = 1 << 20
"""The size of the parts in which values are written, in bytes, since a store limits the size of a value."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.5
_used: Counter[str] = Counter()
_lock = threading.Lock()


class Rendezvous:
    """One rendezvous of a group, the next at each call: all ranks must open their rendezvous in the same order.

    Args:
        group: the group whose ranks share the rendezvous; "world" is the default group.

    Raises:
        WorkloadError: `torch.distributed` is not initialized, or this process is no member of the group.
    """

    def __init__(self, group: Group) -> None:
        if not dist.is_initialized():
            hint = "Call torch.distributed.init_process_group first, or leave group= out."
            raise WorkloadError("there are no ranks: torch.distributed is not initialized", where="group", hint=hint)
        if isinstance(group, str) and group != "world":
            raise WorkloadError(f"{group!r} is no process group", where="group", hint='Pass one, or "world".')
        chosen = dist.distributed_c10d._get_default_group() if group == "world" else group
        ranks = dist.get_process_group_ranks(chosen)
        if dist.get_rank() not in ranks:
            raise WorkloadError(f"rank {dist.get_rank()} is no member of the group", where="group")
        with _lock:
            _used[chosen.group_name] += 1
            # The store of `torchrun` outlives a restart of the ranks, and still holds what the earlier ranks wrote.
            incarnation = f"{len(ranks)}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            name = f"fxlib/{chosen.group_name}/{incarnation}/{_used[chosen.group_name]}"
        self._store: Any = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.size, self.rank = len(ranks), ranks.index(dist.get_rank())

    def write(self, name: str, data: bytes) -> None:
        """Write a value under a name of this rank's, once."""
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            self._store.set(_key(self.rank, name, index), chunk)
        self._store.set(_key(self.rank, name), str(len(chunks)))

    def read(self, rank: int, name: str, deadline: Deadline) -> bytes:
        """Wait for a rank's value, and return it.

        Raises:
            RemoteError: it was not written in time, or the ranks' store is gone.
        """
        pause_s = _FIRST_PAUSE_S
        try:
            # Not `wait`, which would keep the process's other threads from the store.
            while not self._store.check([_key(rank, name)]):
                if deadline.passed:
                    raise RemoteError(f"rank {rank} has not said its {name} within {deadline.seconds:.0f} s")
                time.sleep(min(pause_s, deadline.left_s))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            count = int(self._store.get(_key(rank, name)))
            return b"".join(bytes(self._store.get(_key(rank, name, index))) for index in range(count))
        except RuntimeError as error:  # of torch: DistStoreError, DistNetworkError
            raise RemoteError(f"the store of the ranks does not answer: {error}") from error

    def read_all(self, name: str, deadline: Deadline) -> list[bytes]:
        """Wait for the values of all ranks, and return them by rank.

        Raises:
            RemoteError: one was not written in time.
        """
        return [self.read(rank, name, deadline) for rank in range(self.size)]

    def delete(self, names: Iterable[str]) -> None:
        """Delete values of this rank that all ranks have read."""
        for name in names:
            count = int(self._store.get(_key(self.rank, name)))
            for index in range(count):
                self._store.delete_key(_key(self.rank, name, index))


def _key(rank: int, name: str, index: int | None = None) -> str:
    return f"{rank}/{name}" if index is None else f"{rank}/{name}/{index}"
