"""What the metrics address answers, path by path, and when the service is ready."""

import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fxlib_service.metrics_page import metrics_app, pages
from tests.service.support import Process


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


@pytest.mark.parametrize("path, status", [("/healthz", "200 OK"), ("/readyz", "503 Service Unavailable")])
def test_a_service_that_shuts_down_lives_and_is_not_ready(path: str, status: str) -> None:
    app, told = pages(metrics_app(CollectorRegistry(), None), lambda: False), list[str]()
    list(app({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, headers: told.append(status)))
    assert told == [status]
