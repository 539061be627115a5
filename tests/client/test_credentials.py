"""A user's launchers and service meet without options; others need the token, which never goes unencrypted."""

import os
import socket
import stat
from pathlib import Path

import grpc
import pytest

import fxlib
from fxlib.cli import main
from fxlib.client.connection import Connection, Deadline
from fxlib.client.credentials import choose
from fxlib.errors import CredentialError, FxlibError, FxlibWarning, RejectedError
from fxlib.utils.local_service import RUNTIME_DIR, TOKEN_FILE, LocalService, find, make_folder, new_token, read_token
from fxlib.v1 import jobs_pb2, jobs_pb2_grpc
from tests.client.models import Clicks, workload
from tests.service.certificates import certificates
from tests.service.principals import token, write_policy
from tests.service.support import refused
from tests.shared.real_service import real_service


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv(RUNTIME_DIR, str(path))
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    return path


def token_file(folder: Path, text: str) -> Path:
    path = folder / "some.token"
    path.write_text(text + "\n")
    return path


def bare(address: str, secret: str = "") -> grpc.StatusCode:
    """Ask a service over TCP for its jobs, with a token or without, and return the status."""
    with grpc.insecure_channel(address) as channel:
        shown = (("authorization", f"Bearer {secret}"),) if secret else ()
        try:
            stub = jobs_pb2_grpc.OptimizerServiceStub(channel)
            stub.ListJobs(jobs_pb2.ListJobsRequest(), timeout=60, wait_for_ready=True, metadata=shown)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.slow
def test_one_user_s_service_and_launcher_meet_without_options(tmp_path: Path, folder: Path) -> None:
    with real_service(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        here = LocalService(folder=folder, port=port)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(here.token.stat().st_mode) == 0o600
        target, _ = choose(address, token_file=None, tls=None, insecure=False)
        assert target == here.target
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []
        assert bare(address) is grpc.StatusCode.UNAUTHENTICATED
        assert bare(address, new_token()) is grpc.StatusCode.UNAUTHENTICATED
        assert bare(address, read_token(here.token)) is grpc.StatusCode.OK
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_without_the_socket_the_port_is_met_with_the_token(tmp_path: Path, folder: Path) -> None:
    with real_service(tmp_path) as address:
        LocalService(folder=folder, port=int(address.rpartition(":")[2])).socket.unlink()
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []


@pytest.mark.slow
def test_what_a_killed_service_left_is_replaced_by_the_next_one(tmp_path: Path, folder: Path) -> None:
    with real_service(tmp_path) as address:
        pass
    here = LocalService(folder=folder, port=int(address.rpartition(":")[2]))
    here.write_token("of one that was killed")
    here.socket.touch()
    assert not here.answers()
    with real_service(tmp_path, "--listen", address), fxlib.connect(address, patience_s=60) as client:
        assert client.jobs() == []
        assert read_token(here.token) != "of one that was killed"


@pytest.mark.slow
def test_the_next_service_removes_what_killed_ones_left_long_ago(tmp_path: Path, folder: Path) -> None:
    with real_service(tmp_path) as address:
        dead, fresh = (LocalService(folder=folder, port=port) for port in (1, 2))
        for each in (dead, fresh):
            each.write_token("of one that was killed")
            each.socket.touch()
        (folder / "notes.token").touch()
        alive = LocalService(folder=folder, port=int(address.rpartition(":")[2]))
        for path in (dead.socket, dead.token, alive.socket, alive.token, folder / "notes.token"):
            os.utime(path, (0, 0))
        with real_service(tmp_path / "next"):
            assert not dead.socket.exists()
            assert not dead.token.exists()
            assert all(path.exists() for path in (fresh.socket, fresh.token, alive.socket, alive.token))
            assert (folder / "notes.token").exists()


@pytest.mark.slow
def test_a_service_without_a_socket_asks_its_own_user_for_the_token(tmp_path: Path, folder: Path) -> None:
    with real_service(tmp_path, "--tcp-only") as address:
        here = LocalService(folder=folder, port=int(address.rpartition(":")[2]))
        assert not here.socket.exists()
        assert bare(address) is grpc.StatusCode.UNAUTHENTICATED
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []


@pytest.mark.slow
def test_a_folder_may_be_named_with_signs_that_mean_something_in_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_DIR, str(tmp_path / "a%41 b#c?d"))
    with real_service(tmp_path) as address:
        target, _ = choose(address, token_file=None, tls=None, insecure=False)
        assert target.startswith("unix:")
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []


@pytest.mark.slow
def test_a_service_on_the_same_port_of_another_address_takes_nothing_over(tmp_path: Path) -> None:
    with real_service(tmp_path / "first") as address:
        other = address.replace("127.0.0.1", "127.0.0.2")
        said = refused("--data", str(tmp_path / "second"), "--listen", other, "--metrics", "127.0.0.1:0")
        assert "another service of this user's listens there" in said
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []


@pytest.mark.slow
def test_a_token_of_one_s_own_is_what_the_service_asks_for(tmp_path: Path) -> None:
    path = token_file(tmp_path, secret := new_token())
    with real_service(tmp_path, "--token-file", str(path)) as address:
        assert bare(address, secret) is grpc.StatusCode.OK
        with fxlib.connect(address, token_file=path, patience_s=60) as client:
            assert client.jobs() == []
        assert main(["jobs", "--service", address, "--token-file", str(path)]) == 0
        path.write_text(new_token())
        with fxlib.connect(address, token_file=path, patience_s=60) as client, pytest.raises(RejectedError) as caught:
            client.jobs()
        assert caught.value.code == "UNAUTHENTICATED"


@pytest.mark.slow
def test_a_token_for_loopback_goes_through_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path, new_token())
    with socket.create_server(("127.0.0.1", 0)) as proxy, real_service(tmp_path, "--token-file", str(path)) as address:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with fxlib.connect(address, token_file=path, patience_s=10) as client:
            assert client.jobs() == []
        proxy.settimeout(0.1)
        with pytest.raises(TimeoutError):
            proxy.accept()


@pytest.mark.slow
def test_a_policy_s_client_uses_its_token_and_not_the_owner_s_socket(tmp_path: Path) -> None:
    path = token_file(tmp_path, token("ads"))
    with (
        real_service(tmp_path, "--policy", str(write_policy(tmp_path))) as address,
        fxlib.connect(address, token_file=path, patience_s=60) as client,
        pytest.raises(RejectedError) as caught,
    ):
        client.jobs(namespace="web")
    assert caught.value.code == "PERMISSION_DENIED"


@pytest.mark.slow
def test_tls_and_a_token_go_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files, path = certificates(tmp_path, "server"), token_file(tmp_path, new_token())
    options = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--token-file", str(path)]
    with real_service(tmp_path, *options) as address:
        with fxlib.connect(address, tls=fxlib.Tls(ca=files.ca), token_file=path, patience_s=60) as client:
            assert client.jobs() == []
        assert main(["jobs", "--service", address, "--tls-ca", str(files.ca)]) == 1
        assert "UNAUTHENTICATED" not in capfd.readouterr().out


@pytest.mark.slow
def test_with_certificates_alone_whoever_has_one_is_the_owner(tmp_path: Path) -> None:
    server, own = certificates(tmp_path, "server"), certificates(tmp_path, "client")
    options = ["--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--client-ca", str(own.ca)]
    with real_service(tmp_path, *options) as address:
        tls = fxlib.Tls(ca=server.ca, certificate=own.certificate, key=own.key)
        with fxlib.connect(address, tls=tls, token_file=None, patience_s=60) as client:
            assert client.jobs() == []


@pytest.mark.parametrize("text", [None, "", "two words", "ünread"])
def test_a_token_that_cannot_be_read_is_a_warning_and_the_original(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "absent" if text is None else token_file(tmp_path, text)
    graph = fxlib.capture(Clicks())
    with fxlib.connect("127.0.0.1:1", token_file=path) as client, pytest.warns(FxlibWarning, match="token") as warned:
        result = client.optimize(graph, workload(), progress=False)
    assert result.module is graph
    assert text is None or not text or text not in str(warned[0].message)


def test_a_token_never_goes_unencrypted_to_another_machine(tmp_path: Path) -> None:
    path = token_file(tmp_path, new_token())
    connection = Connection("192.0.2.1:8470", token_file=path)
    with pytest.raises(CredentialError, match="not sent without encryption"):
        connection.reach(Deadline(1))
    connection.close()
    Connection("192.0.2.1:8470", token_file=path, insecure=True).check_credentials()
    Connection("192.0.2.1:8470", token_file=path, tls=fxlib.Tls()).check_credentials()
    Connection("[::1]:8470", token_file=path).check_credentials()


def test_the_environment_names_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "shown")))
    _, credentials = choose("127.0.0.1:8470", token_file=None, tls=None, insecure=False)
    assert credentials.token() == "shown"


def test_a_folder_that_others_may_enter_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder().chmod(0o755)
    assert find(8470) is None
    with pytest.raises(FxlibError, match="other users may enter it"):
        make_folder()
    folder.chmod(0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert find(8470) is None
    with pytest.raises(FxlibError, match="belongs to another user"):
        make_folder()


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FxlibError, match="it is not a folder"):
        make_folder()


@pytest.mark.slow
def test_a_token_of_somebody_else_s_never_goes_to_the_socket_that_makes_everybody_the_owner(
    tmp_path: Path, folder: Path
) -> None:
    with real_service(tmp_path / "data", "--policy", str(write_policy(tmp_path))) as address:
        with fxlib.connect(address) as owner, owner.speaking_for(token("viewer")) as viewer:
            assert owner.capabilities().fxlib_version == viewer.capabilities().fxlib_version
            with pytest.raises(RejectedError, match="'viewer' is viewer"):
                viewer.cancel("any")
            with pytest.raises(RejectedError, match="belongs to no principal"), owner.speaking_for("guessed") as nobody:
                nobody.capabilities()
        port = int(address.rpartition(":")[2])
        local = find(port)
        assert local is not None
        with fxlib.connect(local.target) as owner, pytest.raises(CredentialError, match="everybody is the owner"):
            owner.speaking_for(token("viewer"))


@pytest.mark.parametrize("text", ["", "two words", "a\nline", "ü", "x" * 5000])
def test_what_is_no_token_speaks_for_nobody(text: str) -> None:
    with fxlib.connect("localhost:1") as client, pytest.raises(CredentialError, match="no token"):
        client.speaking_for(text)
