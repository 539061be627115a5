"""The worker's command line, its logs, and what it says of its host."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fxlib.errors import FxlibError
from fxlib_workers import logs
from fxlib_workers.__main__ import main, parse
from fxlib_workers.service_client import fingerprint


def test_options_become_a_configuration() -> None:
    config = parse(
        [
            *("--service", "host:1", "--slots", "2", "--once", "--name", "w"),
            *("--allow-module", "a.b", "--allow-module", "c", "--keep-env", "SHARDS", "--keep-env", "AWS_*"),
        ]
    )
    assert (config.service, config.name, config.slots, config.once) == ("host:1", "w", 2, True)
    assert config.trial.allowed_modules == ("a.b", "c")
    assert config.trial.keep_variables == ("SHARDS", "AWS_*")
    assert config.tls is None


def test_every_worker_has_a_name_of_its_own() -> None:
    assert parse([]).name


def test_a_certificate_turns_tls_on() -> None:
    tls = parse(["--tls-ca", "ca.pem"]).tls
    assert tls is not None
    assert tls.ca == Path("ca.pem")


def test_a_cluster_needs_a_network_interface() -> None:
    with pytest.raises(FxlibError, match="--interface"):
        parse(["--ray-address", "head:6379"])


def test_no_slot_is_refused() -> None:
    with pytest.raises(FxlibError, match="--slots"):
        parse(["--slots", "0"])


def test_a_module_that_is_not_there_is_told_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--allow-module", "no.such.module"]) == 2
    assert "no.such.module" in capsys.readouterr().err


def test_the_fingerprint_is_the_same_each_time() -> None:
    assert fingerprint() == fingerprint()
    assert "cores" in fingerprint()
    assert fingerprint("head:6379").endswith("Ray at head:6379")


def test_a_log_line_holds_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fxlib.worker"):
        logs.info("tried", job="j", seconds=1.23456, why="two words", none=None, forged="a\nb=c")
    assert caplog.messages == ['tried job=j seconds=1.235 why="two words" none=None forged="a\\nb=c"']
