"""The push of a gradient, and what one message to a server carries of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

from fxlib import batch
from fxlib.contracts import Contract, contract_of
from fxlib.errors import ContractError
from fxlib.runtime import functions, ops
from fxlib.runtime.deadlines import DEADLINES, NO_LIMIT
from fxlib.runtime.flight import Tracked
from fxlib.runtime.refusals import is_refusal, tell_of_refusal

if TYPE_CHECKING:
    from fxlib.runtime.convoy import Convoy


@dataclass(slots=True, eq=False)
class Push:
    """The push of one gradient. `gradient` is what was sent of it, in memory that nobody else can write to."""

    call: Tracked
    server: str
    contract: Contract | None
    """What the function that takes the gradient declares, where this process knows it."""
    arrived: bool = False
    gradient: Any = None
    convoy: Convoy | None = None
    """What the gradient was sent with, from inside backward."""

    @property
    def due(self) -> bool:
        """Whether there is a gradient to push, or one that was sent."""
        return self.convoy is not None or self.call.has_gradient

    @property
    def batchable(self) -> bool:
        """Whether it may travel with others."""
        return self.contract is not None and self.contract.batchable

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of the call, the gradient last."""
        return (*self.call.args, self.gradient)

    @property
    def part(self) -> Hashable:
        """The value that says which part of the state it touches; None: it may touch all."""
        return None if self.contract is None else self.contract.part_of(self.call.args, self.call.kwargs)


def pushes_of(tracked: Iterable[Tracked]) -> list[Push]:
    """Return the pushes of tracked results."""
    contracts: dict[str, Contract | None] = {}
    found: list[Push] = []
    for each in tracked:
        if each.gradient not in contracts:
            contracts[each.gradient] = _contract_of(each.gradient)
        found.append(Push(each, ops.server_name(each.to), contracts[each.gradient]))
    return found


def _contract_of(gradient: str) -> Contract | None:
    try:
        return contract_of(functions.resolve(gradient))
    except ContractError:
        return None


def parcels_of(pushes: Iterable[Push]) -> list[list[Push]]:
    """Put neighbours that may travel together into one list each."""
    parcels: list[list[Push]] = []
    open_to = ""
    for push in pushes:
        if push.batchable and open_to == push.server:
            parcels[-1].append(push)
        else:
            parcels.append([push])
        open_to = push.server if push.batchable else ""
    return parcels


class Parcel:
    """Pushes to one server in one message: those to different parts of its state side by side, others in order.

    Args:
        pushes: in program order.

    Raises:
        Exception: whatever `rpc_async` raises at once.
    """

    def __init__(self, pushes: Sequence[Push]) -> None:
        self.pushes = pushes
        self._chains = _chains(pushes)
        self.future: Any = self._send()

    def outcomes(self) -> dict[Push, Any]:
        """Return the outcomes, once the message has been answered. What stands behind a failure has none.

        Empty if the server refused the message, and all of its pushes are to be made singly.
        """
        try:
            answer = self.future.wait()
        except Exception as error:  # noqa: BLE001 - the program's push raises it
            if len(self.pushes) > 1 and is_refusal(error):
                tell_of_refusal(self.pushes[0].server, error)
                return {}
            return {self.pushes[0]: Raised(error)}
        finally:
            DEADLINES.forget(self.future)
        if len(self.pushes) == 1:
            return {self.pushes[0]: answer}
        if len(self._chains) == len(self.pushes):
            return dict(zip([push for (push,) in self._chains], answer, strict=True))
        answers = [answer] if len(self._chains) == 1 else answer
        found: dict[Push, Any] = {}
        for chain, told in zip(self._chains, answers, strict=True):
            # A chain of one is the call itself; in another, the outcomes end with the first failure.
            found |= zip(chain, [told] if len(chain) == 1 or batch.failed(told) else told, strict=False)
        return found

    def _send(self) -> ops.Future:
        function: Callable[..., Any]
        first = self.pushes[0].call
        if len(self.pushes) == 1:
            return ops.launch(first.to, first.gradient, self.pushes[0].arguments, first.kwargs, first.timeout_s)
        if len(self._chains) == 1:
            function, args, _ = _as_one(self.pushes)
        else:
            function, args = batch.run, ([_as_one(chain) for chain in self._chains],)
        server, limit = self.pushes[0].server, _limit_of(self._chains)
        deadline = DEADLINES.deadline(server, limit)
        future: ops.Future = rpc.rpc_async(first.to, function, args=args, timeout=deadline)
        DEADLINES.watch(server, limit, future)
        return future


@dataclass(frozen=True, slots=True)
class Raised:
    """An outcome that was raised in this process."""

    error: Exception


def _chains(pushes: Sequence[Push]) -> list[list[Push]]:
    """Return the pushes that keep their order, in lists that need not wait for each other."""
    state = {id(each): _state_of(each) for each in [push.contract for push in pushes]}
    chains: dict[tuple[frozenset[str], Hashable], list[Push]] = {}
    for push in pushes:
        part = push.part
        if part is None:
            return [list(pushes)]
        chains.setdefault((state[id(push.contract)], part), []).append(push)
    touched = set(state.values())
    overlap = sum(map(len, touched)) > len(frozenset().union(*touched))
    return [list(pushes)] if overlap else list(chains.values())


def _state_of(contract: Contract | None) -> frozenset[str]:
    return frozenset() if contract is None else contract.reads | contract.writes


def _call(push: Push) -> batch.Call:
    return functions.resolve(push.call.gradient), push.arguments, dict(push.call.kwargs)


def _as_one(chain: Sequence[Push]) -> batch.Call:
    return _call(chain[0]) if len(chain) == 1 else (batch.run_in_order, (list(map(_call, chain)), _limit_s(chain)), {})


def _limit_s(chain: Sequence[Push]) -> float:
    """Return the time that each push may take; where they have different ones, the message alone has a limit."""
    default = float(rpc.get_rpc_timeout())
    limits = {_own_limit(push.call.timeout_s, default) for push in chain}
    return limits.pop() if len(limits) == 1 else NO_LIMIT


def _limit_of(chains: Sequence[Sequence[Push]]) -> float:
    """Return the time for a message: that of the pushes which wait for one another, where they wait longest.

    Where they run side by side, as many as a server runs at a time, it is once more: the first may run by itself.
    """
    default = float(rpc.get_rpc_timeout())
    own = {each: _own_limit(each, default) for each in {push.call.timeout_s for chain in chains for push in chain}}
    rounds = 1 if len(chains) == 1 else 1 + math.ceil(len(chains) / batch.THREADS)
    if NO_LIMIT in own.values():
        return NO_LIMIT
    return rounds * max([sum([own[push.call.timeout_s] for push in chain]) for chain in chains])


def _own_limit(timeout_s: float | None, default_s: float) -> float:
    return default_s if timeout_s is None or timeout_s == UNSET_RPC_TIMEOUT else float(timeout_s)
