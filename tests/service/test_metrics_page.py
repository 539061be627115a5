"""What the metrics address answers, path by path, and when the service is ready."""

import asyncio
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typing_extensions import override

from fxlib_service.errors import Code, ServiceError
from fxlib_service.server import metrics_app, pages
from fxlib_service.stores.base import Stats
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import Process, eventually, make_service


def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    asked = urllib.request.Request(f"http://{address}{path}", method=method)  # our own address
    try:
        response: HTTPResponse
        with urllib.request.urlopen(asked, timeout=60) as response:  # noqa: S310
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
def test_probes_and_metrics_have_paths_of_their_own_and_nothing_else_is_there(tmp_path: Path) -> None:
    service = Process(tmp_path)
    try:
        assert ask(service.metrics, "/healthz") == (200, "ok\n")
        assert ask(service.metrics, "/readyz") == (200, "ok\n")
        status, text = ask(service.metrics, "/metrics")
        assert (status, "fxlib_data_free_bytes" in text) == (200, True)
        for path in ("/", "/metrics/", "/metrics/../etc/passwd", "/healthz%00", "/jobs"):
            assert ask(service.metrics, path)[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(service.metrics, "/healthz", method)[0] == 405
    finally:
        service.kill()


@pytest.mark.parametrize(
    "path, told", [("/healthz", ("200 OK", b"ok\n")), ("/readyz", ("503 Service Unavailable", b"not ready: because\n"))]
)
def test_a_service_that_is_not_ready_lives_and_says_why(path: str, told: tuple[str, bytes]) -> None:
    app, statuses = pages(metrics_app(CollectorRegistry(), None), lambda: "because"), list[str]()
    body = app({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, headers: statuses.append(status))
    assert (*statuses, b"".join(body)) == told


class Away(MemoryJobStore):
    """A store that refuses while it `refuses`, and says nothing until `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses, self.back = False, threading.Event()
        self.back.set()

    @override
    def ping(self) -> None:
        self.back.wait(60)
        if self.refuses:
            raise ServiceError(Code.STORAGE_UNAVAILABLE, "the database is away")

    @override
    def stats(self) -> Stats:
        self.ping()
        return super().stats()


async def test_a_database_that_is_away_is_told_at_once_and_its_return_too() -> None:
    store = Away()
    async with make_service(store) as core:

        def told() -> tuple[float | None, float | None, bool]:
            gauges = (core.registry.get_sample_value(f"fxlib_{name}") for name in ("database_up", "queue_depth"))
            up, depth = gauges
            return up, depth, core.probe.answers()

        assert await asyncio.to_thread(told) == (1.0, 0.0, True)
        store.refuses = True
        assert await asyncio.to_thread(told) == (0.0, None, False)
        store.refuses = False
        store.back.clear()  # a network that drops everything
        await asyncio.to_thread(told)
        began = time.monotonic()
        assert await asyncio.to_thread(told) == (0.0, None, False)
        assert time.monotonic() - began < 0.5, "nobody waits behind a question that is stuck"
        store.back.set()
        for _ in eventually():
            if await asyncio.to_thread(told) == (1.0, 0.0, True):
                break
        else:
            pytest.fail("the database is back, and is not asked again")
