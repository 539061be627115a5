"""Certificates on real sockets, what is refused without them, and principals told apart by them and by tokens."""

import asyncio
import os
import signal
import socket
import ssl
import time
import urllib.error
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fxlib.errors import FxlibError
from fxlib.v1 import jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from fxlib_service.config import Address, Config, Tls
from fxlib_service.server import Server
from tests.service.certificates import Files, certificates
from tests.service.principals import bearer, write_policy
from tests.service.support import Process, eventually, fetch, worker
from tests.service.test_roles import reason

pytestmark = pytest.mark.slow

ANYWHERE = Address(host="127.0.0.1", port=0)
BY_CERTIFICATE = """
[principals.certified-worker]
role = "worker"
certificates = ["uri:spiffe://example.org/worker"]

[principals.certified-ads]
role = "client"
namespace = "ads"
certificates = ["uri:spiffe://example.org/ads"]
"""


async def served(address: Address, credentials: grpc.ChannelCredentials | None) -> bool:
    target = str(address)
    channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True


def trusting(server: Files, client: Files | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        server.ca.read_bytes(),
        client.key.read_bytes() if client else None,
        client.certificate.read_bytes() if client else None,
    )


async def test_with_a_certificate_only_encrypted_calls_are_served(tmp_path: Path) -> None:
    files, stranger = certificates(tmp_path, "server"), certificates(tmp_path, "stranger")
    tls = Tls(certificate=files.certificate, key=files.key)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    try:
        listen, metrics = await server.start()
        assert await served(listen, trusting(files))
        assert not await served(listen, trusting(stranger))
        assert not await served(listen, None)
        await _scrape(f"https://{metrics}/metrics", ssl.create_default_context(cafile=str(files.ca)))
    finally:
        await server.stop()


async def test_with_a_client_authority_only_its_clients_are_served(tmp_path: Path) -> None:
    files, client, stranger = (certificates(tmp_path, name) for name in ("server", "client", "stranger"))
    tls = Tls(certificate=files.certificate, key=files.key, client_ca=client.ca)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    try:
        listen, metrics = await server.start()
        assert await served(listen, trusting(files, client))
        assert not await served(listen, trusting(files, stranger))
        assert not await served(listen, trusting(files))
        context = ssl.create_default_context(cafile=str(files.ca))
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            await _scrape(f"https://{metrics}/metrics", context)
        context.load_cert_chain(client.certificate, client.key)
        await _scrape(f"https://{metrics}/metrics", context)
    finally:
        await server.stop()


async def _scrape(url: str, context: ssl.SSLContext) -> None:
    assert "fxlib_queue_depth" in await asyncio.to_thread(fetch, url, context)


def _replace(files: Files, by: Files) -> None:
    """Put other certificates in the place of these, one file after the other."""
    for path, newer in ((files.key, by.key), (files.certificate, by.certificate), (files.ca, by.ca)):
        newer.replace(path)


async def _until(told: Callable[[], Awaitable[bool]]) -> None:
    ends = time.monotonic() + 20
    while not await told():
        assert time.monotonic() < ends
        await asyncio.sleep(0.2)


async def test_certificates_that_change_are_shown_and_trusted_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, client = certificates(tmp_path, "server"), certificates(tmp_path, "client")
    newer, newer_client = certificates(tmp_path, "newer"), certificates(tmp_path, "newer-client")
    before, after = trusting(files, client), trusting(newer, newer_client)
    contexts = [ssl.create_default_context(cafile=str(each.ca)) for each in (files, newer)]
    for context, each in zip(contexts, (client, newer_client), strict=True):
        context.load_cert_chain(each.certificate, each.key)
    tls = Tls(certificate=files.certificate, key=files.key, client_ca=client.ca)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    try:
        listen, metrics = await server.start()
        assert await served(listen, before)
        async with grpc.aio.secure_channel(str(listen), before) as opened:
            health = health_pb2_grpc.HealthStub(opened)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            _replace(files, newer)
            newer_client.ca.replace(client.ca)
            await _until(lambda: served(listen, after))
            assert not await served(listen, before)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=60)  # its connection goes on
        await _scrape(f"https://{metrics}/metrics", contexts[1])
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            await _scrape(f"https://{metrics}/metrics", contexts[0])
        assert "PRIVATE" not in caplog.text
    finally:
        await server.stop()


@pytest.mark.parametrize("broken", ["text", "another's key", "gone", "no authority"])
async def test_certificates_that_cannot_be_used_change_nothing_and_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    files, client, other = (certificates(tmp_path, name) for name in ("server", "client", "other"))
    tls = Tls(certificate=files.certificate, key=files.key, client_ca=client.ca)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    change: Callable[[], object]
    match broken:
        case "text":
            change, option = lambda: files.certificate.write_text("no certificate"), "--tls-cert"
        case "another's key":
            change, option = lambda: other.key.replace(files.key), "--tls-cert"
        case "gone":
            change, option = files.key.unlink, "--tls-key"
        case _:
            change, option = lambda: client.ca.write_text(""), "--client-ca"

    async def told() -> bool:
        return "the service goes on with the certificates of before" in caplog.text

    try:
        listen, metrics = await server.start()
        credentials = trusting(files, client)
        change()
        await _until(told)
        assert await served(listen, credentials)
        await asyncio.sleep(1.5)
        lines = [each.message for each in caplog.records if "certificates of before" in each.message]
        assert [line.startswith(option) for line in lines] == [True]
        assert str(metrics).startswith("127.0.0.1:")
    finally:
        await server.stop()


def test_a_signal_has_a_service_read_its_certificates_though_it_has_no_policy(tmp_path: Path) -> None:
    files, log = certificates(tmp_path, "server"), tmp_path / "data.log"
    service = Process(tmp_path / "data", "--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    os.kill(service.pid, signal.SIGHUP)
    assert any("read the certificates again" in log.read_text() for _ in eventually(20.0))
    assert service.stop() == 0


async def test_who_connects_to_the_metrics_and_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    files = certificates(tmp_path, "server")
    tls = Tls(certificate=files.certificate, key=files.key)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    try:
        _, metrics = await server.start()
        context = ssl.create_default_context(cafile=str(files.ca))
        with socket.create_connection((metrics.host, metrics.port)):
            async with asyncio.timeout(20):
                await _scrape(f"https://{metrics}/metrics", context)
    finally:
        await server.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])  # noqa: S104
@pytest.mark.parametrize("option", ["listen", "metrics"])
def test_other_machines_are_not_served_without_tls_unless_that_is_asked_for(
    tmp_path: Path, host: str, option: str
) -> None:
    exposed: dict[str, Any] = {option: Address(host=host, port=0)}
    with pytest.raises(FxlibError, match="TLS is off"):
        Config(data=tmp_path, **exposed)
    assert Config(data=tmp_path, insecure=True, **exposed).insecure
    assert Config(data=tmp_path, tls=Tls(certificate=tmp_path / "c", key=tmp_path / "k"), **exposed).tls


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_is_served_without_tls(tmp_path: Path, host: str) -> None:
    Config(data=tmp_path, listen=Address(host=host, port=1), metrics=Address(host=host, port=2))


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tls = Tls(certificate=tmp_path / "absent.crt", key=tmp_path / "absent.key")
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    with pytest.raises(FxlibError, match=r"--tls-key: cannot read .*absent.key"):
        await server.start()
    await server.stop()


@pytest.mark.parametrize(
    "text, address",
    [
        ("127.0.0.1:8470", Address(host="127.0.0.1", port=8470)),
        ("[::1]:0", Address(host="::1", port=0)),
        ("localhost:1", Address(host="localhost", port=1)),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "8470", "host:", ":8470", "host:99999", "host:-1", "host:http"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize("wrong, option", [("certificate", "--tls-cert"), ("key", "--tls-cert"), ("ca", "--client-ca")])
async def test_files_that_are_not_what_they_should_be_are_told_from_a_taken_port(
    tmp_path: Path, wrong: str, option: str
) -> None:
    files, other = certificates(tmp_path, "server"), certificates(tmp_path, "other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    tls = Tls(
        certificate=garbage if wrong == "certificate" else files.certificate,
        key=other.key if wrong == "key" else files.key,
        client_ca=garbage if wrong == "ca" else files.ca,
    )
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls))
    try:
        with pytest.raises(FxlibError, match=f"^{option}: it cannot be used"):
            await server.start()
    finally:
        await server.stop()


async def told(address: Address, server: Files, own: Files, method: str, who: str = "") -> str:
    """Make a call with a certificate, and a token if a principal is named; return "ok" or the refusal's code."""
    credentials = grpc.ssl_channel_credentials(
        server.ca.read_bytes(), own.key.read_bytes(), own.certificate.read_bytes()
    )
    async with grpc.aio.secure_channel(str(address), credentials) as channel:
        workers: Any = workers_pb2_grpc.WorkerServiceStub(channel)
        jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(channel)
        try:
            if method == "Claim":
                await workers.Claim(workers_pb2.ClaimRequest(worker=worker()), metadata=bearer(who), timeout=60)
            else:
                await jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=bearer(who), timeout=60)
        except grpc.aio.AioRpcError as error:
            return reason(error)
    return "ok"


@pytest.mark.parametrize(
    "name, token, claims, lists",
    [
        ("spiffe://example.org/worker", "", "ok", "PERMISSION_DENIED"),
        ("spiffe://example.org/ads", "", "PERMISSION_DENIED", "ok"),
        ("spiffe://example.org/other", "", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("spiffe://example.org/worker", "ads", "PERMISSION_DENIED", "ok"),
        ("spiffe://example.org/worker", "stranger", "UNAUTHENTICATED", "UNAUTHENTICATED"),
    ],
)
async def test_a_certificate_says_who_it_is_unless_a_token_does(
    tmp_path: Path, name: str, token: str, claims: str, lists: str
) -> None:
    files, own = certificates(tmp_path, "server"), certificates(tmp_path, "own", name)
    tls = Tls(certificate=files.certificate, key=files.key, client_ca=own.ca)
    policy = write_policy(tmp_path)
    policy.write_text(policy.read_text() + BY_CERTIFICATE)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, tls=tls, policy=policy))
    try:
        listen, _ = await server.start()
        assert await told(listen, files, own, "Claim", token) == claims
        assert await told(listen, files, own, "ListJobs", token) == lists
    finally:
        await server.stop()
