"""Budgets of something that callers hold for a while, such as bytes of memory, shared fairly between tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Final, Self

from fxlib_service.errors import Code, ServiceError

_RETRY_AFTER_S: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    amount: int
    admitted: asyncio.Future[None]


class Held:
    """An amount that is held for the duration of a block, or from `take` to `give_back`, and can shrink meanwhile.

    Attributes:
        amount: how much is held.
        linger_s: the time in seconds for which it counts as held after the block. This bounds the amount that a tenant
            takes within any period of that length.
    """

    def __init__(self, budget: FairBudget, tenant: str, amount: int, wait_s: float | None) -> None:
        self._budget = budget
        self._tenant = tenant
        self._wait_s = wait_s
        self.amount = amount
        self.linger_s = 0.0

    async def __aenter__(self) -> Self:
        await self.take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    async def take(self) -> None:
        """Wait until it is this caller's turn; raises the errors of `FairBudget.hold`."""
        await self._budget.take(self._tenant, self.amount, self._wait_s)

    def give_back(self) -> None:
        """Give back the amount, at once or after `linger_s`."""
        if self.linger_s:
            asyncio.get_running_loop().call_later(self.linger_s, self._budget.give, self._tenant, self.amount)
        else:
            self._budget.give(self._tenant, self.amount)

    def shrink(self, amount: int) -> None:
        """Give back whatever exceeds `amount`."""
        if amount < self.amount:
            self._budget.give(self._tenant, self.amount - amount)
            self.amount = amount


class FairBudget:
    """A budget from which callers take amounts for a while.

    A caller that cannot be admitted at once waits. Tenants are served in turn, and the callers of each tenant in the
    order in which they came. A tenant that holds its whole share waits for itself and delays nobody else.

    Args:
        name: name of the bounded resource, for messages and metrics.
        total: the amount that all callers may hold together.
        share: the amount that the callers of one tenant may hold together.
        waiting: number of callers of one tenant that may wait; further ones are refused.
    """

    def __init__(self, name: str, *, total: int, share: int, waiting: int) -> None:
        self.name = name
        self.total = total
        self._share = min(share, total)
        self._most_waiting = waiting
        self._by_tenant: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self.held = 0

    @property
    def waiting(self) -> int:
        """The number of waiting callers."""
        return sum(map(len, self._waiting.values()))

    def hold(self, tenant: str, amount: int, *, wait_s: float | None = None) -> Held:
        """Hold an amount for the duration of the block, once it is this caller's turn.

        An amount above the share of a tenant is held as that share, so that it can be admitted at all.

        Raises:
            ServiceError: SERVICE_BUSY, if too many callers of the tenant wait, or the turn did not come in `wait_s`
                seconds.
        """
        return Held(self, tenant, min(amount, self._share), wait_s)

    def give(self, tenant: str, amount: int) -> None:
        """Give back an amount that a tenant holds, and admit the callers that now can be admitted."""
        self.held -= amount
        self._by_tenant[tenant] -= amount
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._admit()

    async def take(self, tenant: str, amount: int, wait_s: float | None) -> None:
        """Take an amount within the tenant's share once it is this caller's turn; raises the errors of `hold`."""
        if tenant not in self._waiting and self._next() is None and self._fits(tenant, amount):
            self._count(tenant, amount)
            return
        if len(self._waiting.get(tenant, ())) >= self._most_waiting:
            raise self._busy(f"{self._by_tenant[tenant]} of {self._share} are taken by {tenant!r}")
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.admitted
        except TimeoutError:
            self._leave(tenant, waiter)
            raise self._busy(f"no turn came within {wait_s:g} s") from None
        except asyncio.CancelledError:
            self._leave(tenant, waiter)
            raise

    def _admit(self) -> None:
        """Admit callers, one tenant after another, until the next caller has to wait for other tenants' callers."""
        while (tenant := self._next()) is not None and self._fits(tenant, self._waiting[tenant][0].amount):
            queue = self._waiting.pop(tenant)
            waiter = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all other tenants
            if not waiter.admitted.done():  # otherwise its caller has just left
                self._count(tenant, waiter.amount)
                waiter.admitted.set_result(None)

    def _next(self) -> str | None:
        """Return the tenant whose turn it is: the first one with a caller that its share has room for.

        Nobody overtakes that caller; otherwise smaller amounts could keep a large one waiting forever.
        """
        if not self._waiting:
            return None
        waiting = self._waiting.items()
        return next((tenant for tenant, queue in waiting if self._within_share(tenant, queue[0].amount)), None)

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        """Forget a caller that has stopped waiting, or give back the amount that it was granted at that very moment."""
        if waiter.admitted.done() and not waiter.admitted.cancelled():
            self.give(tenant, waiter.amount)
            return
        queue = self._waiting.get(tenant, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[tenant]
        self._admit()

    def _fits(self, tenant: str, amount: int) -> bool:
        return self.held + amount <= self.total and self._within_share(tenant, amount)

    def _within_share(self, tenant: str, amount: int) -> bool:
        return self._by_tenant[tenant] + amount <= self._share

    def _count(self, tenant: str, amount: int) -> None:
        self.held += amount
        self._by_tenant[tenant] += amount

    def _busy(self, why: str) -> ServiceError:
        return ServiceError(
            Code.SERVICE_BUSY,
            f"the service has no room for more {self.name} now: {why}",
            metadata={"limit": self.name},
            retry_after_s=_RETRY_AFTER_S,
        )
