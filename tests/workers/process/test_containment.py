"""What a contained process can do, and what it cannot."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from fxlib_workers.process.containment import Containment, Part, hold_network
from fxlib_workers.process.probe import Level, level_of
from tests.workers.process.contained import ChildFailedError, everything, host, run

isolated = pytest.mark.skipif(
    host().level() is not Level.ISOLATED, reason=f"this host contains no process: {dict(host().missing)}"
)


def test_levels_are_ordered_and_each_includes_those_before() -> None:
    parts = [frozenset[Part](), {Part.FILTER}, {Part.FILTER, Part.FILES}, {Part.FILTER, Part.FILES, Part.NETWORK}]
    assert [level_of(frozenset(each)) for each in parts] == list(Level)
    assert level_of(frozenset({Part.FILES, Part.NETWORK})) is Level.NONE


def test_a_policy_travels_as_text() -> None:
    policy = everything(readable=(Path("/etc"),), user=61200, program=b"\x00\xff", descriptors=(7,))
    assert Containment.loads(policy.dumps()) == policy


@isolated
def test_gradients_are_computed() -> None:
    def work() -> float:
        torch.manual_seed(1)
        layer = nn.Linear(8, 1)
        layer(torch.ones(2, 8)).sum().backward()
        assert layer.weight.grad is not None
        return float(layer.weight.grad.sum())

    assert run(work, everything()) == "16.0"


@isolated
def test_no_file_of_the_host_is_there(tmp_path: Path) -> None:
    (secret := tmp_path / "token").write_text("secret")
    (own := tmp_path / "own").mkdir()
    hidden = ["/etc/shadow", str(secret), "/var/run", "/run", "/var", "/sys/fs/cgroup"]

    def work() -> list[str]:
        (own / "answer").write_text("42")
        return [path for path in hidden if Path(path).exists()]

    assert run(work, everything(writable=(own,))) == "[]"
    assert (own / "answer").read_text() == "42"


@pytest.mark.slow
@isolated
def test_nothing_answers_on_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, hold_network() as network:
        port = server.getsockname()[1]

        def work() -> list[int]:
            codes = []
            for address in (("127.0.0.1", port), ("8.8.8.8", 53)):
                with socket.socket() as client:
                    codes.append(client.connect_ex(address))
            return codes

        assert "PermissionError" in _failure(work, everything())
        assert run(work, everything(network=network)) == "[111, 101]"  # ECONNREFUSED, ENETUNREACH


@isolated
def test_it_ends_by_the_signal_that_ended_it() -> None:
    assert f"status {-signal.SIGSEGV}" in _failure(lambda: os.kill(os.getpid(), signal.SIGSEGV), everything())


def _failure(work: object, policy: Containment) -> str:
    with pytest.raises(ChildFailedError) as caught:
        run(work, policy)  # type: ignore[arg-type]
    return str(caught.value)
