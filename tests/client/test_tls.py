"""A client with the right certificates is served; any other trains with its original."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import fxlib
from fxlib import Tls
from fxlib.cli import main
from fxlib.errors import CredentialError, ServiceUnavailableError
from tests.service.certificates import Files, certificates
from tests.shared.real_service import real_service

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


def test_a_file_that_is_not_there_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):
        fxlib.connect("localhost:8470", tls=Tls(ca=tmp_path / "none"))
    assert main(["jobs", "--tls-ca", "no-such.pem"]) == 1
    assert capfd.readouterr().err == "fxlib: TLS: No such file or directory: no-such.pem\n"


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
