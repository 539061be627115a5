"""Pull batches from a loader: before the loop asks for them if nobody can notice, and else where it asks."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils import data

from fxlib.errors import FxlibWarning

B = TypeVar("B")
_SEQUENCES = (list, tuple, range)
"""Types whose items can be taken before the loop asks for them; a list is looked at once more then."""
_SAMPLERS = (data.RandomSampler, data.SequentialSampler, data.DistributedSampler, data.SubsetRandomSampler)
"""Samplers that draw when their iterator is made and, if they were given a generator, once more at their end."""


@dataclass(slots=True, eq=False)
class Pulled(Generic[B]):
    """The result of one `next` of the loader: a batch, or the exception raised instead, which may be StopIteration."""

    batch: B | None = None
    error: Exception | None = None
    index: int = -1
    """Its index in a list."""
    entry: Any = None
    """The calls that were made ahead for the batch; None if there are none."""
    was_tried: bool = False
    """Whether there was an attempt to make calls for it."""


def why_not_ahead(loader: object) -> str:
    """Return why the batches of a loader may not be pulled before the loop asks for them; empty if they may.

    They may if a pull can neither draw from this process's generators nor read anything that the loop changes.
    """
    if type(loader) in _SEQUENCES:
        return ""
    if not isinstance(loader, data.DataLoader) or not _pulls_as_torch_does(type(loader)):
        return f"nothing is known of what a {type(loader).__name__} does when it is asked for a batch"
    if loader.num_workers == 0:
        return "the loader has no worker processes, and may draw from this process's generators"
    if loader.persistent_workers and not _draws_nothing(loader):
        return "its workers outlive the epoch, and a batch pulled in vain, as before a break, changes what they draw"
    return _why_not_sampled_ahead(loader)


def _draws_nothing(loader: data.DataLoader[Any]) -> bool:
    """Return whether what runs in a loader's workers is known to draw nothing."""
    collates = (data.default_collate, data.default_convert)
    return type(loader.dataset) is data.TensorDataset and loader.collate_fn in collates


def _why_not_sampled_ahead(loader: data.DataLoader[Any]) -> str:
    """Return why indices may not be asked for before the loop asks for their batch; empty if they may."""
    batches = loader.batch_sampler
    samplers = [loader.sampler, getattr(batches, "sampler", loader.sampler)]
    known = (*_SAMPLERS, *_samplers_of_torchdata())
    if type(batches) not in (data.BatchSampler, type(None), *known):
        return f"nothing is known of what a {type(batches).__name__} does when it is asked for indices"
    if isinstance(loader.dataset, data.IterableDataset):
        return ""
    for each in samplers:
        if type(each) not in known:
            return f"nothing is known of what a {type(each).__name__} does when it is asked for an index"
        if _draws_again(each):
            return f"a {type(each).__name__} draws again and again from its generator, which the loop may use, too"
    return ""


def _pulls_as_torch_does(kind: type) -> bool:
    """Return whether a class of loaders has the methods of torch's own, or of torchdata's, that bring its batches."""
    stateful: Any = sys.modules.get("torchdata.stateful_dataloader")
    kinds = [data.DataLoader, *([] if stateful is None else [stateful.StatefulDataLoader])]
    bring = ("__iter__", "_get_iterator")
    return any(all(getattr(kind, name) is getattr(each, name) for name in bring) for each in kinds)


def _draws_again(sampler: Any) -> bool:
    """Return whether a sampler draws from a generator that it was given whenever it has handed out some indices."""
    if getattr(sampler, "generator", None) is None or not hasattr(sampler, "replacement"):
        return False
    return sampler.replacement or sampler.num_samples > len(sampler.data_source)


def _pulls_before_the_end(loader: object) -> float:
    """Return how many batches may be pulled before the sampler comes to its end, where torch's draws once more.

    It is infinite unless the sampler was given a generator, from which the loop may draw, too.
    """
    if not isinstance(loader, data.DataLoader):
        return math.inf
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if getattr(sampler, "generator", None) is None:
        return math.inf
    return len(loader) - loader.num_workers * (loader.prefetch_factor or 0) - 1


def _samplers_of_torchdata() -> tuple[type, ...]:
    """Return the samplers of a `StatefulDataLoader`, which draw from generators of their own; none if none was made."""
    module: Any = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return () if module is None else (module.BatchSampler, module.RandomSampler, module.StatefulDistributedSampler)


class Puller(Generic[B]):
    """Pulls batches from one iterator, on the caller's thread.

    Attributes:
        ahead: whether batches may be pulled before the loop asks for them.
        is_stated: whether that is so because the caller states it, and not by what the loader is.
    """

    def __init__(self, loader: Iterable[B], *, ahead: bool) -> None:
        self._iterator: Iterator[B] = iter(loader)
        self._may_draw = type(loader) not in _SEQUENCES
        self._list: list[B] | None = loader if type(loader) is list else None
        self._next = 0
        self.ahead = ahead
        self.is_stated = ahead and bool(why_not_ahead(loader))
        self._pulled = 0
        """Number of batches that were pulled."""
        self._before_the_end = _pulls_before_the_end(loader)

    def may_pull_early(self) -> bool:
        """Return whether the next batch may be pulled before the loop asks for it, as far as is known by now."""
        return self.ahead and self._pulled < self._before_the_end

    def pull(self, *, early: bool = False) -> Pulled[B]:
        """Return the iterator's next batch or exception.

        Args:
            early: whether this happens before the loop asks for it. Once an early pull draws from a generator, no
                further batch is pulled early.
        """
        if self._list is not None:
            return self._item(self._list)
        before = _generators() if early and self._may_draw else None
        try:
            found = Pulled(batch=next(self._iterator))
        except Exception as error:  # noqa: BLE001 - raised where the loop asks for the batch
            found = Pulled(error=error)
        self._pulled += 1
        if before is not None and before != _generators():
            self.ahead = False
            warnings.warn(
                "the loader draws from this process's random generators, so its batches are no longer pulled ahead: "
                "what the model draws may differ from a plain loop by then. Give the loader a generator of its own.",
                FxlibWarning,
                stacklevel=4,
            )
        return found

    def _item(self, held: list[B]) -> Pulled[B]:
        if self._next >= len(held):
            return Pulled(error=StopIteration())
        self._next += 1
        return Pulled(batch=held[self._next - 1], index=self._next - 1)

    def as_asked_for(self, pulled: Pulled[B]) -> Pulled[B]:
        """Return what the plain loop gets where it asks for a batch: a list may have changed since that was pulled."""
        if self._list is None or self._is_still(pulled, self._list):
            return pulled
        self._next = pulled.index if pulled.error is None else self._next
        return self._item(self._list)

    def _is_still(self, pulled: Pulled[B], held: list[B]) -> bool:
        if pulled.error is not None:
            return self._next >= len(held)
        return pulled.index < len(held) and held[pulled.index] is pulled.batch


def _generators() -> tuple[object, ...]:
    """Return the states of the processor's generators in this process that a loader may draw from."""
    numpy = sys.modules.get("numpy")
    own = None if numpy is None else numpy.random.get_state(legacy=False)
    of_numpy = [each.tobytes() if hasattr(each, "tobytes") else each for each in pytree.tree_leaves(own)]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy
