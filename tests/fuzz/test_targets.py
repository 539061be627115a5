"""Every target of fuzzing, for a short while and without guidance; and the oracles that judge it."""

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxlib.errors import FxlibError
from tests.fuzz import oracles
from tests.fuzz.__main__ import NAMES
from tests.fuzz.oracles import ViolationError, Watch, attempt
from tests.fuzz.targets import TARGETS
from tests.shared.many import many


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_the_command_knows_every_target() -> None:
    assert set(NAMES) == TARGETS.keys()


@pytest.mark.parametrize("rounds", [15, pytest.param(many(300), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_arrives_is_read_or_refused_and_nothing_else_happens(name: str, rounds: int, watch: Watch) -> None:
    target, rng = TARGETS[name], random.Random(rounds)
    seeds = list(target.seeds())
    for seed in seeds:
        attempt_unwatched(target.read, seed, target.refusals)
    for _ in range(rounds):
        changed = target.mutated(rng.choice(seeds), rng, rng.choice(seeds))
        attempt_unwatched(target.read, changed, target.refusals)  # imports what its first such input needs
        attempt(target.read, changed, target.refusals, watch)


def attempt_unwatched(read: Callable[[bytes], object], data: bytes, refusals: tuple[type[Exception], ...]) -> None:
    try:
        read(data)
    except refusals:
        return


def evaluate(_: bytes) -> None:
    eval("1 + 1")  # noqa: S307 - what the oracle looks for


def run_a_program(_: bytes) -> None:
    subprocess.run(["true"], check=True)


def write_a_file(_: bytes) -> None:
    Path("/dev/null").write_bytes(b"")


def connect(_: bytes) -> None:
    with socket.socket() as made:
        made.connect_ex(("127.0.0.1", 9))


def import_a_module(_: bytes) -> None:
    sys.modules.pop("this", None)
    __import__("antigravity_of_nobody")


def start_a_thread(_: bytes) -> None:
    threading.Timer(0.1, int).start()


def turn_gradients_off(_: bytes) -> None:
    torch.set_grad_enabled(False)


def draw(_: bytes) -> None:
    torch.rand(1)


def take_long(_: bytes) -> None:
    sum(range(50_000_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    "escape, words",
    [
        (evaluate, "compiles as <string>"),
        (run_a_program, "subprocess.Popen"),
        (write_a_file, "writes /dev/null"),
        (connect, "socket.connect"),
        (import_a_module, "imports antigravity_of_nobody"),
        (start_a_thread, "starts the thread"),
        (turn_gradients_off, "changes the grad mode"),
        (draw, "changes the generator"),
        (take_long, "processor time"),
    ],
)
def test_an_escape_is_found(
    escape: Callable[[bytes], Any], words: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracles, "_SECONDS", 0.1)
    try:
        with pytest.raises(ViolationError, match=words):
            attempt(escape, b"", (Exception,), watch)
    finally:
        torch.set_grad_enabled(True)


def test_an_exception_that_nobody_promised_is_a_finding(watch: Watch) -> None:
    def fail(_: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        attempt(fail, b"", (FxlibError,), watch)


def test_without_atheris_fuzzing_says_so_and_ends(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as util; util.find_spec = lambda name: None\n"
        "from tests.fuzz.__main__ import main; sys.exit(main([]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fuzzing: skipped (atheris is not there" in ran.stdout
