"""When the next batch may be pulled before the loop asks for it, and what is kept of a pull until then."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils import data

from fxlib.errors import FxlibWarning

B = TypeVar("B")
_SAMPLERS = (data.RandomSampler, data.SequentialSampler, data.DistributedSampler, data.SubsetRandomSampler)
"""Samplers that draw, if at all, when their iterator is made."""


@dataclass(slots=True, eq=False)
class Pulled(Generic[B]):
    """What one `next` of the loader brought: a batch, or the exception in its place, StopIteration among them."""

    batch: B | None = None
    error: Exception | None = None
    entry: Any = None
    """What was made ahead for the batch; None where that is nothing."""
    was_tried: bool = False
    """Whether anybody has tried to make calls for it."""


def why_not_ahead(loader: object) -> str:
    """Return why the batches of a loader may not be pulled before the loop asks for them; empty if they may.

    They may where a pull can neither draw from this process's generators nor read what the loop changes.
    """
    if isinstance(loader, (list, tuple, range)):
        return ""
    if not isinstance(loader, data.DataLoader):
        return f"nothing is known of what a {type(loader).__name__} does when it is asked for a batch"
    if loader.num_workers == 0:
        return "the loader has no worker processes, and may draw from this process's generators"
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) not in (data.BatchSampler, type(None)):
        return f"nothing is known of what a {type(batches).__name__} does when it is asked for indices"
    if not isinstance(loader.dataset, data.IterableDataset) and type(sampler) not in _SAMPLERS:
        return f"nothing is known of what a {type(sampler).__name__} does when it is asked for an index"
    return ""


class Puller(Generic[B]):
    """Pulls batches from one iterator, on the caller's thread.

    Attributes:
        ahead: whether batches may be pulled before the loop asks for them.
    """

    def __init__(self, loader: Iterable[B], *, ahead: bool) -> None:
        self._iterator: Iterator[B] = iter(loader)
        self._may_draw = not isinstance(loader, (list, tuple, range))
        self.ahead = ahead

    def pull(self, *, early: bool = False) -> Pulled[B]:
        """Return what the iterator brings next.

        Args:
            early: before the loop asks for it. If that draws from a generator, it was the last time.
        """
        before = _generators() if early and self._may_draw else None
        try:
            found = Pulled(batch=next(self._iterator))
        except Exception as error:  # noqa: BLE001 - raised where the loop asks for the batch
            found = Pulled(error=error)
        if before is not None and before != _generators():
            self.ahead = False
            warnings.warn(
                "the loader draws from this process's random generators, so its batches are no longer pulled ahead: "
                "what the model draws may differ from a plain loop by then. Give the loader a generator of its own.",
                FxlibWarning,
                stacklevel=4,
            )
        return found


def _generators() -> tuple[object, ...]:
    """Return the states of all generators of this process that a loader may draw from."""
    numpy = sys.modules.get("numpy")
    own = None if numpy is None else numpy.random.get_state()
    told = () if own is None else (own[0], own[1].tobytes(), *own[2:])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), told
