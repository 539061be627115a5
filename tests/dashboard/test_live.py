"""Feeds go on, whatever the service answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fxlib.dashboard import live
from fxlib.dashboard.live import Live
from fxlib.errors import WireError


class _Source:
    """Changes with each look at it, and cannot be read at the second one."""

    def __init__(self) -> None:
        self.looks = 0

    def forget(self) -> None:
        """Keep nothing."""

    def fingerprint(self) -> str:
        self.looks += 1
        if self.looks == 2:
            raise WireError("7 has no meaning", where="Job.state")
        return str(self.looks)


async def test_an_answer_that_cannot_be_read_ends_no_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_POLL_S", 0.01)
    source: Any = _Source()
    feed = Live(cast(Any, None), source, source).changes
    changes = list[str]()
    async with asyncio.timeout(60):
        async for change in feed.read():
            if change is not None:
                changes.append(change)
            if len(changes) == 3:
                break
    assert changes == ["WireError", "3", "4"]
