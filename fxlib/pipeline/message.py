"""The message of a call that runs ahead: the call as the program makes it, or one that brings more, or fewer rows.

Rows may come with the state that their next update needs (`fxlib.pipeline.updates`). A key that a batch names many
times may be sent once: row i of such a result depends on key i alone, so equal keys bring equal rows, and the trainer
gives each position the row of its key. Finding the different keys takes time on the trainer's thread, which a batch is
taken to pay back if it names its keys twice or more on average: a round figure, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxlib import batch
from fxlib.analysis.effects.resources import contract_of_call
from fxlib.pipeline.by_keys import keys_in, with_keys
from fxlib.pipeline.updates import Origin, calls_with_state, origin_of
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.batches import IN_ORDER, NamedCall, issue_batch
from fxlib.runtime.ops.operators import is_this_process, server_name
from fxlib.runtime.tracking.flow_control import own_timeout
from fxlib.spec.contract import Contract

_MOST_DISTINCT = 0.5
"""Largest share of different keys among those of a batch for which each is sent once."""
_LOOK_EVERY = 64
"""Number of batches after which the keys of a call that names few of them twice are looked at again."""


class KeysOnce:
    """Whether each key of one message is sent once, as its batches so far suggest."""

    def __init__(self) -> None:
        self._passed: float = 0

    def give_up(self) -> None:
        """Send keys as the program does from now on, since a message has failed."""
        self._passed = math.inf

    def of(
        self, calls: Sequence[NamedCall], contracts: Sequence[Contract]
    ) -> tuple[Sequence[NamedCall], Sequence[torch.Tensor]] | None:
        """Return the calls with each of their keys once, and for each call the row that each position has of these.

        It returns None if the keys of a call are not of one dimension, or if few are named twice.

        Raises:
            NotByKeys: the keys do not distinguish rows.
        """
        if self._passed:
            self._passed -= 1
            return None
        keys = [keys_in(contract, args, kwargs) for contract, (_, args, kwargs) in zip(contracts, calls, strict=True)]
        total = sum(map(len, keys))
        found = [each.unique(return_inverse=True) for each in keys] if all(each.dim() == 1 for each in keys) else []
        if not total or not found or sum(len(once) for once, _ in found) > _MOST_DISTINCT * total:
            self._passed = _LOOK_EVERY - 1
            return None
        sent = [
            (name, *with_keys(contract, (args, kwargs), once))
            for (name, args, kwargs), contract, (once, _) in zip(calls, contracts, found, strict=True)
        ]
        return sent, [positions for _, positions in found]


class Message:
    """One call, or one batch of calls, with its arguments as the prologue made them, and as they are sent.

    Attributes:
        arguments: the arguments of the program's own operator.
        is_batch: whether it has several calls.
    """

    __slots__ = ("_keys_once", "_node", "_sent", "arguments", "is_batch")

    def __init__(self, node: Node, arguments: tuple[Any, ...], keys_once: KeysOnce | None = None) -> None:
        self._node = node
        self.arguments = self._sent = arguments
        self.is_batch = node.target is issue_batch
        self._keys_once = keys_once

    @property
    def server(self) -> str:
        """Name of the server."""
        return server_name(self.arguments[0])

    @property
    def stays_here(self) -> bool:
        """Whether it calls this very process."""
        return is_this_process(self.arguments[0])

    @property
    def timeout_s(self) -> float:
        """Time limit for the server, in seconds; 0 means no limit."""
        return own_timeout(self._timeout) * (len(self.arguments[1]) if self.is_batch else 1)

    @property
    def calls(self) -> Sequence[NamedCall]:
        """The calls as they are sent: a single one, or those of a batch."""
        calls: Sequence[NamedCall] = self._sent[1] if self.is_batch else [self._sent[1:4]]
        return calls

    def with_keys_once(self, contracts: Sequence[Contract]) -> Sequence[torch.Tensor]:
        """Have each key sent once, if that pays; return which of the rows each position has, if so.

        Raises:
            NotByKeys: the keys do not distinguish rows.
        """
        found = None if self._keys_once is None else self._keys_once.of(self.calls, contracts)
        if found is None:
            return ()
        calls, positions = found
        to, *_ = self.arguments
        self._sent = (to, tuple(calls), *self.arguments[2:]) if self.is_batch else (to, *calls[0], self._timeout)
        return positions

    def with_state(self, contracts: Sequence[Contract]) -> Sequence[Origin]:
        """Have the rows read with their state, and return their origins; return none if that is impossible."""
        pairs = zip(self.calls, contracts, strict=True)
        origins = [found for pair in pairs if (found := origin_of(self.server, *pair)) is not None]
        batched_by = self.arguments[3] if self.is_batch else None
        sent = calls_with_state(self.calls, contracts, batched_by) if len(origins) == len(contracts) else None
        if sent is None:
            return []
        calls, batched_by = sent
        to, timeout = self.arguments[0], self._timeout
        self._sent = (to, calls, timeout, batched_by) if self.is_batch else (to, *calls[0], timeout)
        return origins

    def as_written(self) -> None:
        """Have the call sent as the program makes it."""
        self._sent = self.arguments

    def failed(self) -> bool:
        """Note that what was sent has failed; return whether it was another call than the program's."""
        if self._sent is self.arguments:
            return False
        if self._keys_once is not None:
            self._keys_once.give_up()
        return True

    def issue(self, calls: Sequence[NamedCall] | None = None) -> Any:
        """Send it, or only these calls, and return its future or, of a batch, the `BatchInFlight`."""
        sent = self._sent if calls is None else self._with(calls)
        return issue_batch(*sent) if self.is_batch else ops.issue_call(*sent)

    def as_call(self, calls: Sequence[NamedCall] | None = None) -> batch.Call | None:
        """Return it, or only these calls, as one call of a larger message; None if it cannot travel in one."""
        calls = self.calls if calls is None else calls
        if not self.is_batch:
            contract = contract_of_call(self._node)
            ((name, args, kwargs),) = calls
            batchable = contract is not None and contract.batchable and not name.startswith(".")
            return (functions.resolve(name), args, kwargs) if batchable else None
        batched_by = self._sent[3]
        found = [(functions.resolve(name), args, kwargs) for name, args, kwargs in calls]
        if batched_by == IN_ORDER:
            return None
        if batched_by is None:
            return batch.run, (found,), {}
        return batch.run_batched, (functions.resolve(batched_by), found), {}

    @property
    def _timeout(self) -> Any:
        return self.arguments[2 if self.is_batch else 4]

    def _with(self, calls: Sequence[NamedCall]) -> tuple[Any, ...]:
        """Return the arguments that send these calls."""
        if self.is_batch:
            return self.arguments[0], tuple(calls), self._timeout, self._sent[3]
        return self.arguments[0], *calls[0], self._timeout
