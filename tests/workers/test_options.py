"""The worker's command line, its logs, and what it says of its host."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from fxlib.errors import FxlibError, OptionError
from fxlib_workers import logs
from fxlib_workers.__main__ import main
from fxlib_workers.agent import check_containment, check_ray, containment_level
from fxlib_workers.config import APPLICATION, Config
from fxlib_workers.process.child import inherited_variables
from fxlib_workers.process.containment import Part
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.service_client import fingerprint


def parse(arguments: list[str], environment: dict[str, str] | None = None) -> Config:
    return APPLICATION.read(arguments, environment or {})


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
    assert config.tls_ca is None


def test_every_worker_has_a_name_of_its_own() -> None:
    assert parse([]).name


def test_a_certificate_and_its_key_go_together() -> None:
    assert parse(["--tls-ca", "ca.pem"]).tls_ca == Path("ca.pem")
    with pytest.raises(FxlibError, match="--tls-cert: it needs --tls-key, too"):
        parse(["--tls-ca", "ca.pem", "--tls-cert", "worker.pem"])


def test_variables_and_a_file_give_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "fxlib.toml"
    file.write_text('[worker]\nslots = 3\nonce = true\nallow-module = ["a", "b.c"]\ntrial-memory-gib = 0.5\n')
    environment = {
        "FXLIB_SERVICE": "host:1",
        "FXLIB_WORKER_SLOTS": "2",
        "FXLIB_WORKER_KEEP_ENV": "SHARDS, AWS_*",
    }
    config = parse(["--config", str(file), "--no-once"], environment)
    assert (config.service, config.slots, config.once) == ("host:1", 2, False)
    assert (config.trial.allowed_modules, config.trial.keep_variables) == (("a", "b.c"), ("SHARDS", "AWS_*"))
    assert config.trial.process_memory_bytes == 1 << 29


def test_trials_and_rewrites_do_not_see_options() -> None:
    assert inherited_variables({"FXLIB_SERVE_DATABASE": "postgresql://user:word@host/jobs", "FXLIB_DISABLE": "1"}) == {
        "FXLIB_DISABLE": "1"
    }


def test_a_cluster_needs_a_network_interface() -> None:
    with pytest.raises(FxlibError, match="--interface"):
        parse(["--ray-address", "head:6379"])


def test_no_slot_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--slots", "0"])
    assert "argument --slots: 0 is not positive" in capsys.readouterr().err


def test_a_module_that_is_not_there_is_told_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--allow-module", "no.such.module"]) == 2
    assert "no.such.module" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, told",
    [
        (["--service", "127.0.0.1"], "argument --service: '127.0.0.1' is no HOST:PORT, such as localhost:8470"),
        (["--service", "http://host:1"], "argument --service: 'http://host:1' is no HOST:PORT, such as host:1"),
        (["--name", ""], "argument --name: '' is not one line of 1 to 256 characters"),
        (["--name", "a\nb"], "argument --name: 'a\\nb' is not one line of 1 to 256 characters"),
        (["--interface", "nosuch0"], "--interface: this host has no interface 'nosuch0' with an IPv4 address"),
        (["--host-lock", "/nosuch/l"], "--host-lock: /nosuch/l: No such file or directory"),
    ],
)
def test_a_value_that_would_spoil_each_job_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], told: str
) -> None:
    monkeypatch.setattr("fxlib_workers.agent.Agent.run", lambda self: None)
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(main(given))
    assert told in capsys.readouterr().err


BARE = Available.without({Part.FILES: "there is no user namespace", Part.NETWORK: "there is no user namespace"})
WHOLE = Available(parts=frozenset(Part))


@pytest.mark.parametrize(
    "host, options, level",
    [
        (WHOLE, [], Level.ISOLATED),
        (WHOLE, ["--interface", "eth0"], Level.PRIVATE),
        (BARE, [], Level.FILTERED),
        (Available.without(dict.fromkeys(Part, "no")), [], Level.NONE),
    ],
)
def test_a_worker_starts_at_the_level_that_it_reaches_and_at_no_higher_one(
    host: Available, options: list[str], level: Level
) -> None:
    assert containment_level(parse(options).trial, host) is level
    check_containment(parse([*options, "--require-containment", level.value]), host)
    for each in Level:
        if each.rank > level.rank:
            with pytest.raises(OptionError, match=f"this worker reaches the level {level} only") as raised:
                check_containment(parse([*options, "--require-containment", each.value]), host)
            assert str(raised.value).startswith("--require-containment: ")


def test_what_keeps_a_worker_from_a_level_is_named() -> None:
    with pytest.raises(OptionError, match="files: there is no user namespace; network: there is no user namespace"):
        check_containment(parse(["--require-containment", "isolated"]), BARE)
    with pytest.raises(OptionError, match="meet on the interface that --interface names"):
        check_containment(parse(["--require-containment", "isolated", "--interface", "eth0"]), WHOLE)


@pytest.mark.parametrize(
    "options, host, root, refused",
    [
        ([], BARE, False, False),
        (["--interface", "eth0"], WHOLE, True, False),
        (["--interface", "eth0"], WHOLE, False, True),
        (["--interface", "eth0"], BARE, True, True),
        (["--interface", "eth0", "--expose-ray"], BARE, False, False),
        (["--interface", "eth0", "--ray-address", "head:6379"], BARE, False, False),
    ],
)
def test_a_ray_that_would_listen_on_all_interfaces_needs_its_operator_s_word(
    options: list[str], host: Available, root: bool, refused: bool
) -> None:
    with pytest.raises(OptionError, match="would listen on all interfaces") if refused else nullcontext():
        check_ray(parse(options).trial, host, root=root)


CLUSTER = ["--ray-address", "head:6379", "--interface", "eth0"]


@pytest.mark.parametrize(
    "host, nodes, level",
    [
        (WHOLE, {"a": WHOLE, "b": WHOLE}, Level.PRIVATE),  # the nodes share a network
        (WHOLE, {"a": WHOLE, "b": BARE}, Level.FILTERED),
        (BARE, {"a": WHOLE}, Level.FILTERED),  # which rewrites the graph
    ],
)
def test_a_cluster_contains_as_far_as_the_least_of_its_nodes(
    host: Available, nodes: dict[str, Available], level: Level
) -> None:
    assert containment_level(parse(CLUSTER).trial, host, nodes) is level
    assert check_containment(parse([*CLUSTER, "--require-containment", level.value]), host, nodes) is level


def test_the_node_that_keeps_a_cluster_from_a_level_is_named() -> None:
    required = parse([*CLUSTER, "--require-containment", "private"])
    with pytest.raises(OptionError, match="node b: files: there is no user namespace"):
        check_containment(required, WHOLE, {"a": WHOLE, "b": BARE})


@pytest.mark.slow
def test_a_worker_that_reaches_no_cluster_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "set_up", lambda: None)
    assert main(["--ray-address", "127.0.0.1:9", "--interface", "eth0"]) == 2
    told = "fxlib worker: --ray-address: nothing can be reached at 127.0.0.1:9: Connection refused"
    assert capsys.readouterr().err.startswith(told)


def test_an_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--require-containment", "total"])
    assert "total" in capsys.readouterr().err


def test_the_fingerprint_is_the_same_each_time() -> None:
    assert fingerprint() == fingerprint()
    assert "cores" in fingerprint()
    assert fingerprint("head:6379").endswith("Ray at head:6379")


def test_a_log_line_holds_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fxlib_workers.agent"):
        log = logs.Log("fxlib_workers.agent")
        log.info("tried", job="j", seconds=1.23456, why="two words", none=None, forged="a\nb=c")
    assert caplog.messages == ['tried job=j seconds=1.235 why="two words" none=None forged="a\\nb=c"']
