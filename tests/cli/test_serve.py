"""`fxlib serve` starts a service and a worker, keeps them, and leaves nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Self, cast

import pytest
from typing_extensions import override

import fxlib
from fxlib.cli import serve as command
from fxlib.cli.applications import Child
from fxlib.cli.serve import Stop
from fxlib.errors import FxlibError
from tests.shared.undisturbed import until

pytestmark = pytest.mark.slow

STAND_INS = {
    "fxlib_workers": "",
    "fxlib_service": """
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
ready.with_name("unfinished").write_text('{"listen": "127.0.0.1:1", "metrics": "127.0.0.1:2"}')
ready.with_name("unfinished").replace(ready)
""",
}
PROGRAM = """
import json, os, pathlib, signal, sys, time
if "--print-options" in sys.argv:
    data = sys.argv[sys.argv.index("--data") + 1] if "--data" in sys.argv else None
    options = dict.fromkeys(("ready-file", "tls-cert", "client-ca", "insecure", "token-file")) | {"data": data}
    options["shutdown-grace-seconds"] = "5"
    print(json.dumps({name: {"value": value, "from": "default"} for name, value in options.items()}))
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with pathlib.Path(os.environ["STARTS"]).open("a") as file:
    file.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
"""
WAIT = """
while True:
    time.sleep(0.05)
"""


class Serving:
    """`fxlib serve` on free ports, with stand-ins for the applications named; each start of one is a line."""

    def __init__(self, folder: Path, options: tuple[str, ...], stand_ins: tuple[str, ...], listen: str) -> None:
        self._starts = folder / "starts"
        for name in stand_ins:
            package = folder / "stand-ins" / name
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(PROGRAM + STAND_INS[name] + WAIT)
        command = [sys.executable, "-m", "fxlib.cli", "serve", "--listen", listen, "--metrics", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, "--data", str(folder / "data"), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder / "stand-ins"), "STARTS": str(self._starts)},
        )

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"the service is at (\S+), its metrics at (http://\S+/metrics)", line)
        assert found is not None
        return found[1]

    def starts(self) -> list[str]:
        return self._starts.read_text().splitlines() if self._starts.exists() else []

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def serve(
    folder: Path, *options: str, stand_ins: tuple[str, ...] = ("fxlib_workers",), listen: str = "127.0.0.1:0"
) -> Iterator[Serving]:
    serving = Serving(folder, options, stand_ins, listen)
    try:
        yield serving
    finally:
        serving.process.kill()
        serving.process.communicate()


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def pid_of(start: str) -> int:
    return int(start.split(maxsplit=1)[0])


def test_a_service_and_a_worker_run_until_sigterm_and_a_second_one_on_their_folder_leaves_them_alone(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, "--allow-module", "my.ps") as serving:
        address = serving.address()
        until(lambda: len(serving.starts()) == 1)
        assert serving.starts()[0].endswith(f" --service {address} --allow-module my.ps")
        with serve(tmp_path, "--no-worker", stand_ins=()) as second:
            assert second.process.wait(200) == 1
            assert "another service uses" in second.errors()
        with fxlib.connect(address, patience_s=60) as client:
            assert client.jobs() == []
        pids = serving.children()
        assert len(pids) == 2
        serving.process.terminate()
        assert serving.process.wait(200) == 0
        assert all(gone(pid) for pid in pids)


def test_a_user_s_own_packages_called_service_and_workers_are_not_run(tmp_path: Path) -> None:
    for name in ("service", "workers"):
        package = tmp_path / "stand-ins" / name  # on the path of all that is started
        package.mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (package / file).write_text(f"raise SystemExit('a stranger was run: {name}')")
    with serve(tmp_path, stand_ins=()) as serving:
        with fxlib.connect(serving.address(), patience_s=60) as client:
            assert client.jobs() == []
        until(lambda: len(serving.children()) == 2)
        pids = serving.children()
        time.sleep(3)  # a module that ends at once would have been started again
        assert serving.children() == pids
        serving.process.terminate()
        assert "a stranger was run" not in serving.errors()
        assert serving.process.wait(200) == 0


def test_no_worker_is_started_when_told_so_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with serve(tmp_path, "--no-worker", stand_ins=("fxlib_service",)) as serving:
        serving.address()
        [service] = serving.children()
        assert [pid_of(start) for start in serving.starts()] == [service]
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(200) == 0
        assert gone(service)


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with serve(tmp_path, stand_ins=("fxlib_service", "fxlib_workers")) as serving:
        serving.address()
        until(lambda: len(serving.starts()) == 2)
        os.kill(pid_of(serving.starts()[1]), signal.SIGKILL)
        until(lambda: len(serving.starts()) == 3)
        assert serving.process.poll() is None


def test_a_service_that_dies_ends_the_worker_and_the_command(tmp_path: Path) -> None:
    with serve(tmp_path, stand_ins=("fxlib_service", "fxlib_workers")) as serving:
        serving.address()
        until(lambda: len(serving.starts()) == 2)
        service, worker = (pid_of(start) for start in serving.starts())
        os.kill(service, signal.SIGKILL)
        assert serving.process.wait(200) == 1
        assert gone(worker)
        assert "fxlib: the service: it ended with exit code -9" in serving.errors()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_killed_it_takes_service_and_worker_along(tmp_path: Path) -> None:
    with serve(tmp_path, stand_ins=("fxlib_service", "fxlib_workers")) as serving:
        serving.address()
        until(lambda: len(serving.starts()) == 2)
        pids = serving.children()
        serving.process.kill()
        until(lambda: all(gone(pid) for pid in pids))


def test_the_folder_of_a_killed_one_goes_when_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files := tmp_path / "files").mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    with serve(tmp_path, "--no-worker", stand_ins=("fxlib_service",)) as killed:
        killed.address()
        [left] = files.glob("fxlib-serve-*")
        killed.process.kill()
        killed.process.wait(200)
    assert left.exists()
    with serve(tmp_path / "next", "--no-worker", stand_ins=("fxlib_service",)) as serving:
        serving.address()
        [folder] = files.glob("fxlib-serve-*")
        assert folder != left
        serving.process.terminate()
        assert serving.process.wait(200) == 0
    assert not folder.exists()


def test_an_address_in_use_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with serve(tmp_path, "--no-worker", listen=listen) as serving:
            assert serving.process.wait(200) == 1
            assert "its message is above" in serving.errors()


def test_a_worker_on_a_cluster_is_told_the_interface(tmp_path: Path) -> None:
    cluster = ("--ray-address", "10.0.0.1:6379", "--interface", "eth0")
    with serve(tmp_path, *cluster, stand_ins=("fxlib_service", "fxlib_workers")) as serving:
        until(lambda: len(serving.starts()) == 2)
        assert serving.starts()[1].endswith(" ".join(cluster))


def test_what_a_worker_cannot_work_with_is_told_before_anything_starts(tmp_path: Path) -> None:
    with serve(tmp_path, "--ray-address", "10.0.0.1:6379", stand_ins=("fxlib_service",)) as serving:
        assert serving.process.wait(200) == 2
        assert serving.starts() == []
        assert "--interface: the processes of a trial on a cluster cannot" in serving.errors()


def test_what_the_service_cannot_use_is_exit_code_2(tmp_path: Path) -> None:
    with serve(tmp_path, "--no-worker", "--lease-seconds", "soon") as serving:
        assert serving.process.wait(200) == 2
        assert "--lease-seconds: 'soon' is not a number" in serving.errors()


def test_the_service_has_the_grace_that_it_was_given_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str, arguments: list[str], *, grace_s: float) -> Child:
        raise FxlibError(f"{module} has {grace_s} s")

    settled = dict.fromkeys(("ready-file", "client-ca")) | {"shutdown-grace-seconds": "60"}
    monkeypatch.setattr(command, "_settled", lambda *_: settled)
    monkeypatch.setattr(command, "Child", start)
    with pytest.raises(FxlibError, match=r"fxlib_service has 72\.0 s"):
        command.run(["--no-worker"])


def test_an_option_that_there_is_not_is_told_in_the_words_of_the_command(tmp_path: Path) -> None:
    with serve(tmp_path, "--lsten", "x") as serving:
        assert serving.process.wait(200) == 2
        said = serving.errors()
        assert said.startswith("usage: fxlib serve ")
        assert "fxlib serve: error: unrecognized arguments: --lsten x" in said


def test_a_client_authority_needs_workers_of_its_own(tmp_path: Path) -> None:
    with serve(tmp_path, "--client-ca", "ca.pem", "--tls-cert", "c.pem", "--tls-key", "k.pem") as serving:
        assert serving.process.wait(200) == 1
        assert "Use --no-worker, and start it with fxlib worker." in serving.errors()


def test_a_file_gives_options_to_the_service_and_to_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "fxlib.toml"
    file.write_text('[serve]\ninsecure = true\n[worker]\ninterface = "eth0"\n')
    with serve(tmp_path, "--config", str(file), listen="0.0.0.0:0") as serving:
        port = serving.address().rpartition(":")[2]
        until(lambda: len(serving.starts()) == 1)
        assert serving.starts()[0].endswith(f" --service localhost:{port} --config {file}")


def test_a_worker_is_told_the_file_of_a_token_that_the_service_was_given(tmp_path: Path) -> None:
    token = tmp_path / "some.token"
    token.write_text("a-secret")
    with serve(tmp_path, "--token-file", str(token)) as serving:
        address = serving.address()
        until(lambda: len(serving.starts()) == 1)
        assert serving.starts()[0].endswith(f" --service {address} --token-file {token}")


@pytest.mark.parametrize(
    "listen, given, own, shown",
    [
        ("127.0.0.1:1", None, None, []),
        ("0.0.0.0:1", "given.token", None, ["--token-file", "told.token"]),
        ("0.0.0.0:1", "given.token", "own.token", []),
        ("10.0.0.1:1", None, None, ["--token-file", "told.token", "--insecure"]),
        ("10.0.0.1:1", None, "own.token", ["--insecure"]),
    ],
)
def test_a_worker_with_a_token_of_its_own_keeps_it(
    listen: str, given: str | None, own: str | None, shown: list[str]
) -> None:
    addresses = {"listen": listen, "token_file": "told.token"}
    assert command._shown(addresses, {"token-file": given, "insecure": True}, {"token-file": own}) == shown


@pytest.mark.parametrize("was_steady", [False, True])
def test_a_worker_that_dies_again_and_again_is_given_up_if_none_was_ever_steady(
    monkeypatch: pytest.MonkeyPatch, *, was_steady: bool
) -> None:
    ends = Stop()

    class Dead:
        code = 3
        started = 0

        def __init__(self, module: str, arguments: list[str]) -> None:
            Dead.started += 1
            if Dead.started > 9:
                ends.set()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class Impatient(Stop):
        @override
        def wait(self, seconds: float) -> bool:
            return super().wait(0.0)

    monkeypatch.setattr(command, "Child", Dead)
    service = cast(Child, SimpleNamespace(code=None))
    if was_steady:
        monkeypatch.setattr(command, "_STEADY_S", -1.0)
        assert command._attend_with_worker(service, [], ends) == 0
        assert Dead.started > 6
        return
    with pytest.raises(FxlibError, match="the worker: it died 6 times in a row"):
        command._attend_with_worker(service, [], Impatient())
    assert Dead.started == 6
