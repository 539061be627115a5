"""Update rows in the trainer as the server updates them, so that no conflict of keys costs a round trip.

The contract of a read may name a function that returns its rows with all that their next update needs (`with_state=`),
and the contract of a push may name the function that makes such an update (`update=`). Then the rows that a forward had
are enough to know them after the push of their gradient, and so in each batch that was read ahead. The updated row
replaces the row that was read; it does not matter whether that was read before or after the push.

An update is made on all rows of a push at once, as the server makes it: some operators compute other bits row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fxlib.analysis.effects.prologue import meet
from fxlib.analysis.effects.resources import ServerState, declared_contract, states_of
from fxlib.batch import KnownRows
from fxlib.errors import ContractError
from fxlib.runtime import functions
from fxlib.runtime.gradients.pushes import Push
from fxlib.runtime.ops.batches import IN_ORDER, NamedCall
from fxlib.runtime.tracking.autograd_node import as_it_is
from fxlib.spec.contract import Contract
from fxlib.utils.compare import same_bits

_PLAIN = frozenset({str, int, float, bool, type(None)})
Part: TypeAlias = tuple[str, str | int | None]
"""A server, and a part of its state; None means any part."""


class NotUpdated(Exception):  # noqa: N818 - no error: the rows are read again
    """Rows cannot be updated here; its text says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of rows apart from their keys: rows of one origin with the same key are the same."""

    server: str
    part: str | int | None
    function: str
    gradient: str
    others: tuple[str, ...]
    """The arguments other than keys, as they are written."""


def origin_of(server: str, call: NamedCall, contract: Contract) -> Origin | None:
    """Return the origin of a read's result if it can come with its state, else None."""
    name, args, kwargs = call
    part, keys = contract.part_of(args, kwargs), contract.keys_of(args, kwargs)
    if contract.with_state is None or contract.gradient is None:
        return None
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1:
        return None
    others = _others(args, kwargs, keys)
    if others is None:
        return None
    if not (_declares(name, "with_state", contract.with_state) and _declares(contract.gradient, "update", None)):
        return None
    known = declared_contract(contract.with_state)
    if known is None or not known.reads <= contract.reads:  # what a write changes beyond the rows would go unnoticed
        return None
    return Origin(server, part, contract.with_state, contract.gradient, others)


def _others(args: tuple[Any, ...], kwargs: Mapping[str, Any], keys: torch.Tensor) -> tuple[str, ...] | None:
    """Return the arguments other than keys, as they are written; None if some cannot be compared in this form."""
    found = [*(each for each in args if each is not keys), *(each for pair in sorted(kwargs.items()) for each in pair)]
    if len(found) != len(args) + 2 * len(kwargs) - 1 or not _PLAIN.issuperset(map(type, found)):
        return None
    return tuple(map(repr, found))


def _declares(name: str, option: str, value: str | None) -> bool:
    """Whether this process knows a function that declares an option, and the function that the option names."""
    try:
        found = getattr(declared_contract(name), option, None)
        return found is not None and value in (None, found) and bool(functions.resolve(found))
    except ContractError:
        return False


def calls_with_state(
    calls: Sequence[NamedCall], contracts: Sequence[Contract], batched_by: str | None
) -> tuple[tuple[NamedCall, ...], str | None] | None:
    """Return calls that read the same rows with their state, and their batched form; None if there is none.

    Args:
        calls: the calls, each of which has an origin.
        contracts: the contract of each call.
        batched_by: the batched form of the calls; None if they run individually.
    """
    if batched_by == IN_ORDER:
        return None
    names = [str(contract.with_state) for contract in contracts]
    if batched_by is not None:
        forms = {getattr(declared_contract(name), "batched_by", None) for name in names}
        (batched_by,) = forms if len(forms) == 1 else (None,)
        if batched_by is None:
            return None
    sent: list[NamedCall] = [(name, args, kwargs) for name, (_, args, kwargs) in zip(names, calls, strict=True)]
    return tuple(sent), batched_by


@dataclass(slots=True, eq=False)
class Block:
    """The rows of one call that a forward had, as the server has them until a push changes them."""

    origin: Origin
    reads: frozenset[ServerState]
    keys: torch.Tensor
    known: KnownRows


def replaced(known: KnownRows, rows: torch.Tensor, others: KnownRows) -> KnownRows:
    """Return rows of which some are replaced by others."""
    pairs = zip(known.tensors, others.tensors, strict=True)
    first, *state = (each.index_copy(0, rows, other) for each, other in pairs)
    return replace(known, rows=first, state=tuple(state))


def some_of(known: KnownRows, rows: torch.Tensor) -> KnownRows:
    """Return some of the rows."""
    first, *state = (each.index_select(0, rows) for each in known.tensors)
    return replace(known, rows=first, state=tuple(state))


def same_known(one: KnownRows, other: KnownRows) -> bool:
    """Whether rows have the same bits, and are updated in the same way."""
    alike = one.settings == other.settings and len(one.state) == len(other.state)
    return alike and all(map(same_bits, one.tensors, other.tensors))


class _Update:
    """The new rows of a push's keys."""

    def __init__(self, keys: torch.Tensor, known: KnownRows) -> None:
        self.known = known
        self._keys, self._order = keys.long().sort()

    def of(self, keys: torch.Tensor) -> tuple[torch.Tensor, KnownRows] | None:
        """Return the indices of the keys that the push changes, with their new rows; None if it changes none."""
        if not len(self._keys):
            return None
        found = torch.searchsorted(self._keys, keys.long()).clamp_(max=len(self._keys) - 1)
        hit = (self._keys[found] == keys).nonzero().reshape(-1)
        return (hit, some_of(self.known, self._order[found[hit]])) if len(hit) else None


class Updates:
    """The rows that the pushes of a step change, as they are afterwards.

    Args:
        pushes: the pushes of the step, in program order.
        blocks: the rows of the forwards whose gradients are pushed.
    """

    def __init__(self, pushes: Sequence[Push], blocks: Sequence[Block]) -> None:
        self._pushes = pushes
        waiting: dict[tuple[Any, ...], list[Block]] = {}
        for each in blocks:
            waiting.setdefault((each.origin.server, each.origin.gradient, each.origin.others), []).append(each)
        self._blocks: dict[Push, Block] = {}
        for push in pushes:
            if (block := _block_of(push, waiting)) is not None:
                self._blocks[push] = block
        self._forget_what_others_change()
        self._origins: dict[Part, set[Origin]] = {}
        for block in self._blocks.values():
            self._origins.setdefault((block.origin.server, block.origin.part), set()).add(block.origin)
        self._made: dict[Origin, list[_Update]] | None = None

    def _forget_what_others_change(self) -> None:
        """Forget blocks that a push without a block may change; their pushes then count as pushes without a block."""
        while len(self._blocks) < len(self._pushes):
            unknown = [push for push in self._pushes if push not in self._blocks]
            lost = [push for push, block in self._blocks.items() if _meets(block.reads, unknown)]
            if not lost:
                return
            for push in lost:
                del self._blocks[push]

    def cover(self, reads: frozenset[ServerState], origins: Sequence[Origin]) -> bool:
        """Whether the results on rows of these origins are known for all pushes that may change what was read."""
        if len(self._blocks) < len(self._pushes):
            unknown = [push for push in self._pushes if push not in self._blocks]
            if _meets(reads, unknown):
                return False
        return all(map(self._is_sole_origin, origins))

    def _is_sole_origin(self, origin: Origin) -> bool:
        """Whether no push changes rows of this origin as rows of another one."""
        if origin.part is not None and (origin.server, None) not in self._origins:
            return self._origins.get((origin.server, origin.part), {origin}) == {origin}
        met = (found for (server, _), found in self._origins.items() if server == origin.server)
        return all(found == {origin} for found in met)

    def make(self) -> None:
        """Make the updates, once.

        Raises:
            NotUpdated: the result of an update has the wrong form.
            Exception: whatever an update raises.
        """
        if self._made is not None:
            return
        made: dict[Origin, list[_Update]] = {}
        left = list(self._blocks.values())
        for push, block in self._blocks.items():
            left.remove(block)
            changed = _Update(block.keys, _updated(push, block.known))
            made.setdefault(block.origin, []).append(changed)
            for other in left:
                if other.origin == block.origin and (found := changed.of(other.keys)) is not None:
                    other.known = replaced(other.known, *found)
        self._made = made

    def of(self, origin: Origin, keys: torch.Tensor) -> Iterator[tuple[torch.Tensor, KnownRows]]:
        """Yield for each push in turn the indices of the rows that it changes, and the new rows."""
        for update in (self._made or {}).get(origin, ()):
            if (found := update.of(keys)) is not None:
                yield found


def _block_of(push: Push, waiting: Mapping[tuple[Any, ...], list[Block]]) -> Block | None:
    """Return the rows that a push changes, as they are before it, and remove them from `waiting`."""
    call, contract = push.call, push.contract
    if contract is None or contract.update is None:
        return None
    keys = contract.keys_of(call.args, call.kwargs)
    if not isinstance(keys, torch.Tensor):
        return None
    found = waiting.get((push.server, call.gradient, _others(call.args, call.kwargs, keys)), [])
    gradient, part = call.gradient_of_result(), contract.part_of(call.args, call.kwargs)
    for block in found:
        fits = isinstance(gradient, torch.Tensor) and gradient.shape == block.known.rows.shape
        if fits and part == block.origin.part and keys.dtype == block.keys.dtype and torch.equal(keys, block.keys):
            found.remove(block)
            return block
    return None


def _meets(reads: frozenset[ServerState], pushes: Sequence[Push]) -> bool:
    return any(meet(reads, states_of(each.contract, each.server)[1]) for each in pushes)


@torch.no_grad()
def _updated(push: Push, known: KnownRows) -> KnownRows:
    assert push.contract is not None and push.contract.update is not None  # noqa: PT018, S101 - it has a block
    name = push.contract.update
    with torch.autocast("cpu", enabled=False):
        args, kwargs = as_it_is(push.call.arguments), as_it_is(push.call.kwargs)  # the pushes in flight have the others
        found: object = functions.resolve(name)(known, *args, **kwargs)
    if not isinstance(found, KnownRows) or len(found.tensors) != len(known.tensors):
        raise NotUpdated(f"{name} returns other rows than it was given")
    for new, old in zip(found.tensors, known.tensors, strict=True):
        if new.shape != old.shape or new.dtype != old.dtype or new.requires_grad:
            raise NotUpdated(f"{name} returns rows of another kind")
    if found.settings != known.settings:
        raise NotUpdated(f"{name} changes settings, and rows that were read before it have the old ones")
    return found
