"""Ask one question for several trainers: rank 0 asks the service, and all ranks adopt its answer, or none does.

All ranks write to one `Rendezvous` and read from it: each rank writes its question, rank 0 writes the service's answer,
each rank writes whether it could bind the answer to its own module, and rank 0 counts the votes and writes the result.
A rendezvous uses the key-value store in which the ranks have met. So it needs no particular backend, and no collective,
which a training loop would have to order among its own. Only bytes are written; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from torch import distributed as dist

from fxlib import protocol, wire
from fxlib.client.connection import Deadline
from fxlib.client.request import Prepared
from fxlib.client.session import Answer, Outcome, conclude, kept
from fxlib.errors import FxlibError, RemoteError, WorkloadError
from fxlib.v1 import jobs_pb2

_SETTLE_S = 60.0
"""Time limit for the ranks to bind an answer, in seconds."""
_NO = b"no "
_YES = b"yes"

Group: TypeAlias = "dist.ProcessGroup | Literal['world']"
_CHUNK_BYTES = 1 << 20
"""Size in bytes of the parts in which values are written, since a store limits the size of a value."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.5
_used: Counter[str] = Counter()
_lock = threading.Lock()


class DisagreementError(RemoteError):
    """The ranks cannot adopt one answer; the message says which of them cannot, and why."""


def ask_together(
    rendezvous: Rendezvous,
    own: Prepared | Outcome,
    deadline: Deadline,
    inquire: Callable[[Prepared], Answer],
) -> Outcome:
    """Ask one question together with all other ranks; raise nothing.

    Args:
        rendezvous: the rendezvous of the ranks.
        own: this rank's question; or why it has none, in which case no rank adopts anything.
        deadline: the deadline for the service's answer.
        inquire: a function that asks the service; it is called only on rank 0.
    """
    original = own.captured if isinstance(own, Prepared) else own.result.module
    try:
        rendezvous.write("question", _described(own))
        if rendezvous.rank == 0:
            rendezvous.write("answer", _answer(rendezvous, own, deadline, inquire))
        answer = _read_answer(rendezvous, deadline)
        assert isinstance(own, Prepared)  # noqa: S101 - else rank 0 would have said no
        outcome = _bind(own, answer)
        rendezvous.write("vote", _NO + outcome.problem.encode() if outcome.problem else _YES)
        if rendezvous.rank == 0:
            verdict = _verdict(rendezvous, Deadline(deadline.left_s + _SETTLE_S))
            rendezvous.write("verdict", verdict)
            if verdict == _YES:  # else a rank may still be reading it
                rendezvous.delete(["answer"])
        _check(rendezvous.read(0, "verdict", Deadline(deadline.left_s + 2 * _SETTLE_S)))
    except Exception as error:  # noqa: BLE001 - promised: whatever happens on the way, the job trains
        known = isinstance(own, Outcome) and (own.problem or own.result.reason is not None)
        return own if isinstance(own, Outcome) and known else kept(original, error)
    return outcome


def withdraw(rendezvous: Rendezvous, why: str) -> None:
    """Let the other ranks know that this one will not take part, so that none waits for it."""
    notice = _NO + why.encode()
    rendezvous.write("question", notice)
    if rendezvous.rank == 0:
        rendezvous.write("answer", notice)


class Turn:
    """Decides at which call of `swap` the ranks take the new module: the first that none of them has made.

    Backward runs a module's collectives, too, in an order that follows the forward's. So all ranks must change modules
    at the same step.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._made = 0
        self._is_announced = False
        self._first: float | None = None
        self._known = threading.Event()

    def settle(self) -> None:
        """Tell the other ranks how many calls this one has made, and learn theirs; called once, on any thread.

        Raises:
            RemoteError: a rank did not tell its number.
        """
        self.tell()
        first = float("inf")
        try:
            first = 1 + max(map(int, self._rendezvous.read_all("swaps", Deadline(_SETTLE_S))))
        finally:
            self._first = first
            self._known.set()

    def tell(self) -> None:
        """Tell the other ranks how many calls this one has made, unless they know."""
        with self._lock:
            if not self._is_announced:
                self._rendezvous.write("swaps", str(self._made).encode())
                self._is_announced = True

    def has_come(self) -> bool:
        """Count a call, and return whether it is the agreed one or a later one; wait for the other ranks if needed."""
        with self._lock:
            self._made += 1
            made, is_announced = self._made, self._is_announced
        if is_announced:
            self._known.wait()
        return self._first is not None and is_announced and made >= self._first


def _described(own: Prepared | Outcome) -> bytes:
    """Return a rank's question: the graph without details that may differ by machine, or that there is no question."""
    if isinstance(own, Outcome):
        return _NO + (own.problem or own.result.explanation).encode()
    digests = hashlib.sha256(_digest(own.blobs[own.request.graph.sha256]))
    for each in own.request.variants:
        digests.update(each.name.encode() + b"\0" + _digest(own.blobs[each.graph.sha256]))
    return _YES + digests.digest()


def _digest(data: bytes) -> bytes:
    graph = wire.parse(data)
    graph.ClearField("texts")
    for storage in graph.storages:
        storage.device = ""
    return hashlib.sha256(wire.serialize(graph)).digest()


def _answer(
    rendezvous: Rendezvous, own: Prepared | Outcome, deadline: Deadline, inquire: Callable[[Prepared], Answer]
) -> bytes:
    try:
        questions = rendezvous.read_all("question", deadline)
        for rank, question in enumerate(questions):
            if not question.startswith(_YES):
                raise DisagreementError(_text(question), where=f"rank {rank}")
            if question != questions[0]:
                raise DisagreementError(
                    "its graph is another one than that of rank 0",
                    where=f"rank {rank}",
                    hint="All ranks must capture the same program, with the same constants in it.",
                )
        assert isinstance(own, Prepared)  # noqa: S101 - the rank has said so
        answer = inquire(own)
    except Exception as error:  # noqa: BLE001 - all ranks have to know
        return _NO + _sentence(error).encode()
    job = protocol.job_to_proto(answer.job).SerializeToString()
    variants = [part for name, graph in answer.variants.items() for part in (name.encode(), graph)]
    parts = (job, answer.graph, len(answer.variants).to_bytes(8, "big"), *variants, *answer.values.values())
    return _YES + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _read_answer(rendezvous: Rendezvous, deadline: Deadline) -> Answer:
    notice = rendezvous.read(0, "answer", Deadline(deadline.left_s + _SETTLE_S))
    _check(notice)
    parts, begin = list[bytes](), len(_YES)
    while begin < len(notice):
        end = begin + 8 + int.from_bytes(notice[begin : begin + 8], "big")
        parts.append(notice[begin + 8 : end])
        begin = end
    job, graph, count, *rest = parts
    named = 2 * int.from_bytes(count, "big")
    variants, values = rest[:named], rest[named:]
    return Answer(
        job=protocol.job_from_proto(jobs_pb2.Job.FromString(job)),
        graph=graph,
        variants={name.decode(): each for name, each in zip(variants[::2], variants[1::2], strict=True)},
        values={hashlib.sha256(value).hexdigest(): value for value in values},
    )


def _bind(own: Prepared, answer: Answer) -> Outcome:
    try:
        return Outcome(result=conclude(own, answer))
    except Exception as error:  # noqa: BLE001 - the error becomes a vote
        return kept(own.captured, error, job_id=answer.job.id)


def _verdict(rendezvous: Rendezvous, deadline: Deadline) -> bytes:
    try:
        for rank, vote in enumerate(rendezvous.read_all("vote", deadline)):
            if not vote.startswith(_YES):
                return _NO + f"rank {rank} cannot take the answer: {_text(vote)}".encode()
    except RemoteError as error:
        return _NO + str(error).encode()
    return _YES


def _check(notice: bytes) -> None:
    if not notice.startswith(_YES):
        raise DisagreementError(_text(notice), where="no rank adopts the answer")


def _text(notice: bytes) -> str:
    return notice[len(_NO) :].decode(errors="replace")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, FxlibError) else f"unexpected {type(error).__name__}: {error}"


class Rendezvous:
    """One rendezvous of a group, a new one at each call: all ranks must open their rendezvous in the same order.

    Args:
        group: the group whose ranks share the rendezvous; "world" is the default group.

    Raises:
        WorkloadError: `torch.distributed` is not initialized, or this process is not a member of the group.
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
        """Write a value once under one of this rank's names."""
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            self._store.set(_key(self.rank, name, index), chunk)
        self._store.set(_key(self.rank, name), str(len(chunks)))

    def read(self, rank: int, name: str, deadline: Deadline) -> bytes:
        """Wait for a rank's value, and return it.

        Raises:
            RemoteError: the value was not written in time, or the ranks' store is gone.
        """
        pause_s = _FIRST_PAUSE_S
        try:
            # This does not use `wait`, which would keep the process's other threads from the store.
            while not self._store.check([_key(rank, name)]):
                if deadline.passed:
                    raise RemoteError(f"rank {rank} has not said its {name} within {deadline.seconds:.0f} s")
                time.sleep(min(pause_s, deadline.left_s))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            count = int(self._store.get(_key(rank, name)))
            return b"".join(bytes(self._store.get(_key(rank, name, index))) for index in range(count))
        except RuntimeError as error:  # torch raises DistStoreError or DistNetworkError
            raise RemoteError(f"the store of the ranks does not answer: {error}") from error

    def read_all(self, name: str, deadline: Deadline) -> list[bytes]:
        """Wait for the values of all ranks, and return them by rank.

        Raises:
            RemoteError: a value was not written in time.
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
