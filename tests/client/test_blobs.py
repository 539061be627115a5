"""Only what the service lacks is sent, and no byte twice."""

import hashlib
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from typing_extensions import override

from fxlib.client import blobs
from fxlib.client import connection as connecting
from fxlib.client.blobs import CHUNK_BYTES, PART_BYTES, download, upload
from fxlib.client.connection import Connection, Deadline
from fxlib.errors import LimitError, RejectedError, WireError
from fxlib.spec.job import Blob
from tests.client.scripted import Scripted, serving


def named(*contents: bytes) -> dict[str, bytes]:
    return {hashlib.sha256(data).hexdigest(): data for data in contents}


def test_a_blob_that_the_service_has_is_not_sent(service: Scripted, connection: Connection) -> None:
    service.blobs = named(b"old")
    assert upload(connection, named(b"old", b"new!"), Deadline(60)) == 4
    assert service.written == 4
    assert service.blobs == named(b"old", b"new!")


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, PART_BYTES, PART_BYTES + CHUNK_BYTES + 7])
def test_a_blob_of_any_size_arrives(service: Scripted, connection: Connection, size: int) -> None:
    data = named(bytes(index % 251 for index in range(size % 4096)) + bytes(size - size % 4096))
    upload(connection, data, Deadline(60))
    assert service.blobs == data
    assert service.written == size


def test_what_others_sent_under_its_name_costs_a_blob_one_more_try(service: Scripted, connection: Connection) -> None:
    data = named(b"the blob itself")
    [name] = data
    service.partial[name] = b"no part"
    upload(connection, data, Deadline(60))
    assert service.blobs == data


def test_an_interrupted_upload_goes_on_where_it_ended(service: Scripted, connection: Connection) -> None:
    service.cut_after = 3 * CHUNK_BYTES
    data = named(b"x" * (5 * CHUNK_BYTES + 3))
    upload(connection, data, Deadline(60))
    assert service.blobs == data
    assert service.written == 5 * CHUNK_BYTES + 3


def test_a_refused_upload_is_not_tried_again(service: Scripted, connection: Connection) -> None:
    service.fail("Write", grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(RejectedError, match="fails as told"):
        upload(connection, named(b"data"), Deadline(60))
    assert service.calls["Write"] == 1


def test_an_interrupted_download_goes_on_where_it_ended(service: Scripted, connection: Connection) -> None:
    service.blobs = named(b"0123456789")
    service.fail("Read half", grpc.StatusCode.UNAVAILABLE)
    [(sha256, data)] = service.blobs.items()
    assert download(connection, Blob(sha256=sha256, size=10), Deadline(60)) == data
    assert service.calls["Read"] == 2


@pytest.mark.parametrize("seconds", [1e12, math.inf])
def test_a_download_takes_as_long_as_it_likes(service: Scripted, connection: Connection, seconds: float) -> None:
    service.blobs = named(b"0123456789")
    [(sha256, data)] = service.blobs.items()
    connection.reach(Deadline(seconds))
    assert download(connection, Blob(sha256=sha256, size=10), Deadline(seconds)) == data


class _Stalls(Scripted):
    """Says nothing more after the first half of the first download."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    @override
    def Read(self, request: Any, context: Any) -> Iterator[Any]:
        for each in super().Read(request, context):
            yield each
            if self.calls["Read"] == 1:
                self.over.wait(60)


def test_a_download_that_stalls_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "ATTEMPT_S", 0.5)
    service = _Stalls()
    service.blobs = named(b"0123456789")
    [(sha256, data)] = service.blobs.items()
    with serving(service) as address, closing(Connection(address)) as connection:
        try:
            assert download(connection, Blob(sha256=sha256, size=10), Deadline(20)) == data
        finally:
            service.over.set()
    assert service.calls["Read"] > 1


def test_bytes_that_are_not_what_was_announced_are_refused(service: Scripted, connection: Connection) -> None:
    service.blobs = {"0" * 64: b"other"}
    with pytest.raises(WireError, match="not those that were announced"):
        download(connection, Blob(sha256="0" * 64, size=5), Deadline(60))


def test_more_bytes_than_announced_are_refused(service: Scripted, connection: Connection) -> None:
    service.blobs = {"0" * 64: b"other"}
    with pytest.raises(WireError, match="more bytes than announced"):
        download(connection, Blob(sha256="0" * 64, size=3), Deadline(60))


def test_a_graph_of_any_size_is_not_read(connection: Connection) -> None:
    with pytest.raises(LimitError):
        download(connection, Blob(sha256="0" * 64, size=blobs.MAX_GRAPH_BYTES + 1), Deadline(60))
