"""Certificates and tokens tell principals apart on one port."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from fxlib.v1 import jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from fxlib_service.config import Address, Config, Tls
from fxlib_service.server import Server
from tests.service.certificates import Files, certificates
from tests.service.principals import bearer, write_policy
from tests.service.support import worker
from tests.service.test_roles import reason

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
