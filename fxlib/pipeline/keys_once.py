"""Send each key of a read that runs ahead once, where a batch names its keys many times over.

Row i of such a result depends on key i alone, so equal keys bring equal rows: the trainer reads the rows of the
different keys, and gives each position the row of its key. Finding the different keys takes time on the trainer's
thread, which a batch is taken to pay back if it names its keys twice or more on average: a round figure, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxlib.pipeline.by_keys import keys_in, with_keys
from fxlib.runtime.ops.batches import NamedCall
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
