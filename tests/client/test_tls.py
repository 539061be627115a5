"""A client with the right certificates is served; any other trains with its original."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import grpc
import pytest

import fxlib
from fxlib import Tls
from fxlib.cli import main
from fxlib.client.connection import Connection, Deadline
from fxlib.errors import CredentialError, ServiceUnavailableError
from tests.service.certificates import Files, certificates
from tests.shared.real_service import free_port, real_service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certificates(tmp_path_factory.mktemp("server"), "server")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certificates(tmp_path_factory.mktemp("client"), "client")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, server: Files, own: Files) -> Iterator[str]:
    options = ["--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--client-ca", str(own.ca)]
    with real_service(tmp_path_factory.mktemp("service"), *options) as address:
        yield address


def test_a_client_with_its_certificate_is_served(address: str, server: Files, own: Files) -> None:
    tls = Tls(ca=server.ca, certificate=own.certificate, key=own.key)
    with fxlib.connect(address, tls=tls, patience_s=60) as client:
        assert client.jobs() == []


def test_the_command_line_takes_the_same_files(address: str, server: Files, own: Files) -> None:
    files = ["--tls-ca", str(server.ca), "--tls-cert", str(own.certificate), "--tls-key", str(own.key)]
    assert main(["jobs", "--service", address, *files]) == 0


def test_without_them_the_service_is_not_reached(address: str, server: Files) -> None:
    for tls in (False, True, Tls(ca=server.ca)):
        with fxlib.connect(address, tls=tls, patience_s=0.5) as client, pytest.raises(ServiceUnavailableError):
            client.jobs()


_GOOD, _EXPIRED = 1, -1


@pytest.mark.parametrize(
    "hours, tls, told",
    [
        (_EXPIRED, Tls(ca="server.ca"), "as its certificate has expired"),
        (_GOOD, Tls(ca="server.ca", server_name="other.example.org"), "as its certificate is for another name"),
        (_GOOD, Tls(ca="client.ca"), "as its certificate is not of an authority that is trusted here"),
        (_GOOD, None, "as it ends unencrypted connections"),
        (None, Tls(ca="server.ca"), "as it does not speak TLS"),
    ],
)
def test_why_a_certificate_does_not_serve_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int | None, tls: Tls | None, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    certificates(tmp_path, "client")
    files = certificates(tmp_path, "server", hours=hours or _GOOD)
    server = grpc.server(ThreadPoolExecutor(1))
    pair = [(files.key.read_bytes(), files.certificate.read_bytes())]
    if hours is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()
    connection = Connection(f"127.0.0.1:{port}", tls=tls)
    with pytest.raises(ServiceUnavailableError, match=told):
        connection.reach(Deadline(1))
    connection.close()
    server.stop(0)


def test_certificates_that_are_renewed_are_shown_and_trusted_by_a_client_that_goes_on(tmp_path: Path) -> None:
    server, own = certificates(tmp_path, "server"), certificates(tmp_path, "client")
    address = f"127.0.0.1:{free_port()}"
    options = ["--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--client-ca", str(own.ca)]
    tls = Tls(ca=server.ca, certificate=own.certificate, key=own.key)
    connection = Connection(address, tls=tls)
    with real_service(tmp_path / "service", "--listen", address, *options):
        assert connection.reach(Deadline(60)).fxlib_version
        newer = certificates(tmp_path, "newer-client")
        newer.key.replace(own.key)
        assert connection.reach(Deadline(60)).fxlib_version  # over the connection of before: they do not fit together
        newer.certificate.replace(own.certificate)
        newer.ca.replace(own.ca)
        for old, new in zip(astuple(server), astuple(certificates(tmp_path, "newer-server")), strict=True):
            new.replace(old)
    with real_service(tmp_path / "service", "--listen", address, *options):
        assert connection.reach(Deadline(60)).fxlib_version
    connection.close()
    with pytest.raises(ValueError, match="closed channel"):
        connection.reach(Deadline(1))


def test_a_file_that_is_not_there_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):
        fxlib.connect("localhost:8470", tls=Tls(ca=tmp_path / "none"))
    assert main(["jobs", "--tls-ca", "no-such.pem"]) == 2
    assert capfd.readouterr().err == "fxlib: --tls-ca no-such.pem: there is no such file\n"


@pytest.mark.parametrize("given", ["certificate", "key"])
def test_half_a_pair_is_refused_before_grpc_ends_the_process(given: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CredentialError, match=f"some.pem: a {given} was given without its"):
        Tls(**{given: "some.pem"})
    option = {"certificate": "--tls-cert", "key": "--tls-key"}[given]
    assert main(["jobs", option, "some.pem"]) == 2
    assert capfd.readouterr().err.startswith(f"fxlib: {option}: it needs --tls-")


def test_what_is_no_pem_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    with pytest.raises(CredentialError, match=r"empty\.pem: holds no certificate or key in PEM form"):
        fxlib.connect("localhost:8470", tls=Tls(ca=tmp_path / "empty.pem"))
