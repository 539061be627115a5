"""Keep track of rows that were read ahead by keys: which of them pushes change, and which were read again.

A contract that names keys says that row i of a result depends on the state of the keys in row i alone, and that a write
changes the state of its keys alone. So a row that was read before a push is still correct if the push has none of its
keys. The other rows are read again behind the push, or updated here as the server updates them, and replace the rows
that were read first. `fxlib.check_keys` tries whether functions keep what they declare; `conflicts` takes from batches
how often keys come again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fxlib.analysis.effects.prologue import Way, meet
from fxlib.analysis.effects.resources import ServerState, states_of
from fxlib.batch.known_rows import KnownRows, numerics
from fxlib.pipeline.program import Program
from fxlib.pipeline.updates import Block, Origin, Updates, replaced, same_known, some_of
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.pushes import Push
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional arguments of a call, and its keyword arguments."""

_SPACE = 1 << 40
"""Number of keys that each part of a state has for itself; no row has a number this large."""
SAMPLED = 16
"""Number of pushes for each one that is tested: a row that it does not change by its contract is read again."""
_Part: TypeAlias = tuple[Any, str | int | None]
"""A server, and a part of its state."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
"""The numbers of no rows."""


class NotByKeys(Exception):  # noqa: N818 - no error: the call is made behind the push, or by its forward
    """The result of a read cannot be repaired row by row; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Rows that are read again.

    Attributes:
        rows: the numbers of these rows in the result of their call, by the call's index in the message.
        sampled: the call of a row that is known without being read again, and the row's index among the call's rows
            here; None if there is no such row.
    """

    rows: Mapping[int, torch.Tensor]
    sampled: tuple[int, int] | None = None


class Rows:
    """The rows of the calls of one message, from when it was sent until its forward takes them.

    Attributes:
        changed: numbers of the rows that pushes may have changed since they were read, counted over all calls in turn,
            in ascending order; empty if there are none.
        known: the result of each call with its state, once it was merged; empty if there is none.
    """

    def __init__(
        self,
        reads: frozenset[ServerState],
        calls: Sequence[Arguments],
        contracts: Sequence[Contract],
        origins: Sequence[Origin] = (),
        positions: Sequence[torch.Tensor] = (),
    ) -> None:
        """Look at the keys of each call.

        Args:
            reads: the server states that are read.
            calls: the arguments of each call.
            contracts: the contract of each call.
            origins: the origins of the rows, if the rows come with their state.
            positions: for each call, the row that each position has of those that are read, if each key is sent once.

        Raises:
            NotByKeys: the keys do not distinguish rows.
        """
        self._reads = reads
        self._calls = calls
        self._contracts = contracts
        self._keys = [keys_in(contract, *call) for contract, call in zip(contracts, calls, strict=True)]
        self._origins, self._positions = origins, positions
        if origins:
            self._keys = list(map(_copied, self._keys))
        parts = [contract.part_of(*call) for contract, call in zip(contracts, calls, strict=True)]
        self._spaces = {part: index for index, part in enumerate(dict.fromkeys(parts))}
        self._of_calls = _Keys([self._spaces[part] for part in parts], self._keys)
        self._lengths = [each.shape[0] for each in self._keys]
        self._ends = torch.tensor(self._lengths, device="cpu").cumsum(0)
        self._length = sum(self._lengths)
        self._sampled: int | None = None
        self._has_updates = False
        """Whether pushes were taken over without reading their rows again."""
        self._repaired: list[tuple[Repair, Callable[[], Sequence[Any]]]] = []
        self.changed: torch.Tensor = _NONE
        self.known: Sequence[KnownRows] = ()

    def __len__(self) -> int:
        return self._length

    @property
    def is_concurrent(self) -> bool:
        """Whether reads of these rows may run concurrently with pushes to the same part of the state."""
        return all(each.concurrent for each in self._contracts)

    def pushed(self, pushes: Sequence[Push], *, sample: int | None) -> None:
        """Note which rows the pushes that are about to be made change.

        Args:
            pushes: the pushes of a step.
            sample: a number that chooses a row to be read again although it should not change; None: no row.

        Raises:
            NotByKeys: a push does not say which keys it changes.
        """
        self._forget_samples()
        met = [each for each in pushes if meet(self._reads, states_of(each.contract, each.server)[1])]
        written = [_written(each) for each in met]
        by_part = None not in self._spaces and all(part is not None for part, _ in written)
        written = [(part, keys) for part, keys in written if not by_part or part in self._spaces]
        if not written or not len(self):
            return
        changed = _Keys([self._spaces.get(part, 0) for part, _ in written], [keys for _, keys in written])
        hit = self._of_rows(torch.isin(self._of_calls.values(by_part=by_part), changed.values(by_part=by_part)))
        if len(self.changed):
            hit[self.changed] = True
        self.changed = hit.nonzero().reshape(-1)
        if sample is not None and len(self.changed) < len(hit):
            others = (~hit).nonzero().reshape(-1)
            self._sampled = int(others[sample % len(others)])

    def may_be_updated(self, updates: Updates) -> bool:
        """Whether the results of all pushes of a step on these rows are known, and no row is out of date by now."""
        return bool(self._origins) and not len(self.changed) and updates.cover(self._reads, self._origins)

    def sample(self, number: int) -> None:
        """Have a row read again that the next pushes do not change, or whose update is known."""
        self._forget_samples()
        self._sampled = number % len(self) if len(self) else None

    def _forget_samples(self) -> None:
        """Compare no row with an earlier reading any more, since pushes that are about to be made may change it."""
        self._sampled = None
        self._repaired = [(replace(repair, sampled=None), read) for repair, read in self._repaired]

    def updated(self, updates: Updates) -> None:
        """Take over the rows as the pushes of a step have changed them."""
        self._has_updates = True
        for index, (origin, keys) in enumerate(zip(self._origins, self._keys, strict=True)):
            for rows, known in updates.of(origin, keys):
                self._repaired.append((Repair(rows={index: rows}), partial(tuple, (known,))))

    @property
    def repairs(self) -> int:
        """Number of pushes whose changes were read again or taken over since the rows were read."""
        return len(self._repaired)

    def blocks(self) -> list[Block]:
        """Return the rows that the forward of the message had."""
        if not self.known or {each.made_by for each in self.known} != {numerics()}:
            return []  # this process may not compute the same bits as the server
        keys = self._keys
        if self._positions:
            keys = [each.index_select(0, positions) for each, positions in zip(keys, self._positions, strict=True)]
        of_calls = zip(self._origins, keys, self.known, strict=True)
        return [Block(origin, self._reads, keys, known) for origin, keys, known in of_calls]

    def _of_rows(self, of_keys: torch.Tensor) -> torch.Tensor:
        """Return for each row whether something holds of any of its keys, given for which keys it holds."""
        if all(each.dim() == 1 for each in self._keys):
            return of_keys
        by_call = of_keys.split([each.numel() for each in self._keys])
        return torch.cat(
            [
                each.view(keys.shape).flatten(1).any(1) if keys.dim() > 1 else each
                for each, keys in zip(by_call, self._keys, strict=True)
            ]
        )

    def to_read_again(self) -> tuple[Repair, list[tuple[int, Arguments]]] | None:
        """Return the rows to read again, and the calls that read them with their indices; None if there are no rows."""
        wanted = self.changed
        if self._sampled is not None:
            wanted = torch.cat([wanted, torch.tensor([self._sampled], device="cpu")]).sort().values
        if not len(wanted):
            return None
        call_of = torch.bucketize(wanted, self._ends, right=True)
        counts = torch.bincount(call_of, minlength=len(self._lengths)).tolist()
        begins = self._ends - torch.tensor(self._lengths, device="cpu")
        rows: dict[int, torch.Tensor] = {}
        calls: list[tuple[int, Arguments]] = []
        sampled = None
        for index, found in enumerate((wanted - begins[call_of]).split(counts)):
            if not counts[index]:
                continue
            rows[index] = found
            keys = self._keys[index].index_select(0, found)
            calls.append((index, with_keys(self._contracts[index], self._calls[index], keys)))
            begin = int(begins[index]) if self._sampled is not None else 0
            if self._sampled is not None and begin <= self._sampled < begin + self._lengths[index]:
                sampled = index, found.tolist().index(self._sampled - begin)
        return Repair(rows=rows, sampled=sampled), calls

    def read_again(self, repair: Repair, results: Callable[[], Sequence[Any]]) -> None:
        """Note that rows are correct again.

        Args:
            repair: the rows.
            results: returns the results of the calls that read them, or raises.
        """
        self._repaired.append((repair, results))
        self.changed, self._sampled = _NONE, None  # from here on, a forward of another thread may take the rows

    def forget(self) -> None:
        """Forget the rows that were read, and which of them have changed, so that all are read anew."""
        self.changed, self._sampled = _NONE, None
        self._repaired.clear()

    @property
    def is_merged(self) -> bool:
        """Whether the answers have to be merged before they are the results of the calls."""
        return bool(self._repaired or self._origins or self._positions)

    def merged(self, results: Sequence[Any]) -> list[Any]:
        """Return the results of the calls, which contain the rows that were read again.

        Raises:
            NotByKeys: the rows of a result do not match its keys.
            KeysBroken: a row has changed that no push was meant to change, or it differs from its update.
            Exception: reading again failed.
        """
        found = [_as_known(each) for each in results]
        for repair, read in self._repaired:
            for (index, rows), each in zip(repair.rows.items(), read(), strict=True):
                first, again = found[index], _as_known(each)
                _check_rows(first, self._lengths[index], first)
                _check_rows(again, rows.shape[0], first)
                if repair.sampled is not None and repair.sampled[0] == index:
                    at = torch.tensor([repair.sampled[1]], device="cpu")
                    one, other = some_of(first, rows[at]), some_of(again, at)
                    if not self._has_updates:  # nothing relied on settings
                        other = replace(other, settings=one.settings)
                    if not same_known(one, other):
                        raise KeysBroken(index)
                found[index] = replaced(first, rows, again)
        if not (self._origins or self._positions):
            return [each.rows for each in found]
        for index, each in enumerate(found):
            _check_rows(each, self._lengths[index], each)
        if self._positions:
            found = [some_of(each, positions) for each, positions in zip(found, self._positions, strict=True)]
        if not self._origins:
            return [each.rows for each in found]
        self.known = found
        return [_copied(each.rows) for each in found]


class _Keys:
    """A sequence of keys, each in the number space of its part of the state."""

    def __init__(self, spaces: Sequence[int], keys: Sequence[torch.Tensor]) -> None:
        self._values = torch.cat([each.reshape(-1).to(torch.int64) for each in keys])
        if len(self._values):
            least, most = torch.aminmax(self._values)
            if int(least) < 0 or int(most) >= _SPACE:  # a negative key may count rows from the end
                raise NotByKeys("a key is negative, or too large")
        self._by_part: torch.Tensor | None = None
        self._spaces, self._sizes = spaces, [each.numel() for each in keys]

    def values(self, *, by_part: bool) -> torch.Tensor:
        """Return the keys; with `by_part`, keys of different parts differ."""
        if not by_part:
            return self._values
        if self._by_part is None:
            spaces, sizes = (torch.tensor(each, device="cpu") for each in (self._spaces, self._sizes))
            self._by_part = self._values + (spaces * _SPACE).repeat_interleave(sizes)
        return self._by_part


class KeysBroken(Exception):  # noqa: N818 - becomes an error of the call, which has its name
    """A row after a push contradicts the contracts; the argument is the index of the call in its message."""


def keys_in(contract: Contract, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the keys of a call.

    Raises:
        NotByKeys: the keys do not distinguish rows.
    """
    found = contract.keys_of(args, kwargs)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or found.device.type != "cpu":
        raise NotByKeys(f"its {contract.keys} is no tensor in this host's memory")
    if found.dtype not in _INTEGERS or found.dim() == 0:
        raise NotByKeys(f"its {contract.keys} is of {found.dtype} and {found.dim()} dimensions")
    return found


def _written(push: Push) -> tuple[str | int | None, torch.Tensor]:
    contract, call = push.contract, push.call
    if contract is None or contract.keys is None:
        raise NotByKeys(f"{call.gradient} does not say which keys it changes")
    return contract.part_of(call.args, call.kwargs), keys_in(contract, call.args, call.kwargs)


def with_keys(contract: Contract, call: Arguments, keys: torch.Tensor) -> Arguments:
    """Return the arguments of a call with other keys."""
    args, kwargs = call
    if contract.keys_at is not None and contract.keys_at < len(args):
        return (*args[: contract.keys_at], keys, *args[contract.keys_at + 1 :]), kwargs
    return args, {**kwargs, str(contract.keys): keys}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, which the program cannot write to before the push."""
    return tensor.clone()


def _as_known(result: Any) -> KnownRows:
    return result if isinstance(result, KnownRows) else KnownRows(rows=result, made_by="")


def _check_rows(known: KnownRows, rows: int, like: KnownRows) -> None:
    if len(known.tensors) != len(like.tensors):
        raise NotByKeys("rows that were read again have another state")
    for each, first in zip(known.tensors, like.tensors, strict=True):
        found: Any = each  # the answer may be anything
        if not isinstance(found, torch.Tensor) or found.dim() == 0 or found.shape[0] != rows:
            raise NotByKeys(f"{rows} keys brought {_shape(found)}")
        if each.shape[1:] != first.shape[1:] or each.dtype != first.dtype or each.requires_grad:
            raise NotByKeys(f"rows that were read again are of another kind: {_shape(each)} and {_shape(first)}")
        if not each.is_contiguous():  # rows that are put together are, and a program can tell
            raise NotByKeys(f"rows lie in memory with the strides {list(each.stride())}")


def _shape(result: Any) -> str:
    return f"a tensor {list(result.shape)}" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"


def conflicts(module: CapturedModule, batches: Sequence[Batch], *, depth: int) -> dict[str, float]:
    """Return the share of each call's rows that pushes change after the call has run ahead, by the call's name.

    A push is taken to have the keys of the read whose gradient it takes.

    Args:
        module: the captured module, before any pass.
        batches: the batches of a loop, in order.
        depth: number of batches that are pulled before their step.

    Raises:
        NotByKeys: a call sends no keys that distinguish rows.
        Exception: whatever the local work that makes the arguments of calls raises.
    """
    program = Program(module)
    with torch.no_grad():
        found = [_keys_of(program, batch) for batch in batches]
    written: list[dict[_Part, torch.Tensor]] = []
    for of_batch in found:
        by_part: dict[_Part, list[torch.Tensor]] = {}
        for part, keys in of_batch.values():
            by_part.setdefault(part, []).append(keys.reshape(-1))
        written.append({part: torch.cat(keys) for part, keys in by_part.items()})
    shares: dict[str, list[float]] = {}
    for index, of_batch in enumerate(found):
        before = [written[(index - distance) % len(found)] for distance in range(1, depth + 1)]
        for name, (part, keys) in of_batch.items():
            changed = torch.cat([each[part] for each in before if part in each] or [keys.new_empty(0)])
            hit = torch.isin(keys, changed).flatten(1).any(1) if keys.dim() > 1 else torch.isin(keys, changed)
            shares.setdefault(name, []).append(float(hit.double().mean()) if len(hit) else 0.0)
    return {name: sum(each) / len(each) for name, each in shares.items()}


def _keys_of(program: Program, batch: Batch) -> dict[str, tuple[_Part, torch.Tensor]]:
    """Return the part of the state and the keys of each call of a batch that is read by keys, by the call's name."""
    arguments = program.arguments(program.values(batch.inputs, batch.kwargs))
    found: dict[str, tuple[_Part, torch.Tensor]] = {}
    for call, (to, _, args, kwargs, _) in zip(program.calls, arguments, strict=True):
        (contract,) = call.contracts
        if call.way is Way.BY_KEYS and contract is not None:
            found[call.name] = (to, contract.part_of(args, kwargs)), keys_in(contract, args, kwargs)
    return found
