"""Help, exit codes, and errors as one line."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxlib.cli import applications, serve
from fxlib.cli.main import _parser
from tests.cli.conftest import Run

COMMANDS = [
    "serve",
    "optimize",
    "jobs",
    "jobs list",
    "jobs show",
    "jobs watch",
    "jobs cancel",
    "capabilities",
    "dashboard",
    "passes",
    "profile",
    "show",
    "analyze",
    "draw",
    "calibrate",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(fxlib: Run, command: str) -> None:
    ran = fxlib(*command.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"usage: fxlib {command}")


def test_the_list_of_commands_is_complete(fxlib: Run) -> None:
    out = fxlib("--help").out
    assert all(f"    {name} " in out for name in ("serve", "worker", "optimize", "jobs", "passes", "profile", "show"))


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of commands that have no further commands."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for each in nested:
        for inner in each.choices.values():
            yield from leaves(inner)
    if not nested:
        yield parser


def test_every_command_that_prints_prints_json_where_it_is_asked_to() -> None:
    elsewhere = {
        f"fxlib {each}" for each in ("serve", "worker", "backup", "restore", "dashboard", "draw", "completion")
    }
    asked = [each for each in leaves(_parser()) if each.prog not in elsewhere]
    assert len(asked) > 15
    for parser in (*asked, serve.options_parser()):
        assert "--json" in parser._option_string_actions, parser.prog


WRONG = [
    [],
    ["no-such-command"],
    ["jobs", "show"],
    ["jobs", "cancel", ""],
    ["jobs", "--limit", "0"],
    ["jobs", "--limit=-1"],
    ["dashboard", "--https-key", "key.pem"],
    ["dashboard", "--host", "*x"],
    ["dashboard", "--host", "a.*.org"],
    ["serve", "--no-such-option"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_command_line_is_exit_code_2(fxlib: Run, arguments: list[str]) -> None:
    assert fxlib(*arguments).code == 2


@pytest.mark.parametrize(
    "address",
    ["localhost:1x", "localhost", "here:", ":8470", "localhost:65536", "localhost:0", "http://localhost:8470"],
)
def test_an_address_that_is_none_is_refused_at_once(fxlib: Run, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    ran = fxlib("jobs", "--service", address)
    assert ran.code == 2
    assert f"{address!r} is no HOST:PORT" in ran.err
    monkeypatch.setenv("FXLIB_SERVICE", address)
    assert fxlib("capabilities").err.splitlines()[-1] == ran.err.splitlines()[-1].replace("jobs list", "capabilities")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["optimze"], "optimize"),
        (["jobs", "lst"], "list"),
        (["jobs", "--nmespace", "x"], "--namespace"),
        (["optimize", "a:b", "--recpe=x"], "--recipe"),
        (["reasons", "NO_SERVISE"], "NO_SERVER"),
        (["serve", "--metrcs", "x"], "--metrics"),
    ],
)
def test_an_error_names_what_was_probably_meant(arguments: list[str], meant: str) -> None:
    command = [sys.executable, "-m", "fxlib.cli", *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.rstrip().endswith(f"Did you mean {meant}?")


@pytest.mark.slow
def test_serve_explains_all_of_its_options_once() -> None:
    command = [sys.executable, "-m", "fxlib.cli", "serve", "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.count("usage:") == 1
    for option in ("--no-worker", "--config", "--metrics", "--max-queued"):
        assert shown.count(f"\n  {option}") == 1


def test_a_service_that_is_away_is_one_line_and_exit_code_1(fxlib: Run) -> None:
    ran = fxlib("jobs", "--service", "127.0.0.1:1", "--patience", "0.2")
    assert (ran.code, ran.out) == (1, "")
    way_out = "Is it running (fxlib serve), and is this its HOST:PORT?"
    assert ran.err == f"fxlib: the service at 127.0.0.1:1: not reached within 0.2 s. {way_out}\n"


@pytest.mark.slow
def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom fxlib.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "command, folder, needed",
    [("serve", "service", "sqlalchemy"), ("worker", "workers", "ray"), ("backup", "service", "sqlalchemy")],
)
@pytest.mark.parametrize("part", ["itself", "what it needs"])
def test_a_missing_application_is_named(
    fxlib: Run, monkeypatch: pytest.MonkeyPatch, *, command: str, folder: str, needed: str, part: str
) -> None:
    requirements: Callable[[str], list[str] | None] = applications._requirements
    missing = f"fxlib-{folder}" if part == "itself" else needed
    monkeypatch.setattr(applications, "_requirements", lambda name: None if name == missing else requirements(name))
    ran = fxlib(command)
    assert ran.code == 1
    why = "" if part == "itself" else f", which fxlib-{folder} needs"
    way_out = f"Run: pip install fxlib-{folder} (in a checkout: pip install ./{folder})"
    assert ran.err == f"fxlib: {missing} is not installed{why}. {way_out}\n"


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m fxlib.cli passes | head -n 0"
    ran = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert ran.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["fxlib_service", "fxlib_workers"])
def test_an_application_that_is_interrupted_while_it_starts_ends_quietly(module: str) -> None:
    program = (
        "import runpy\nfrom fxlib.utils.settings import Application\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        f"Application.read = interrupted\nrunpy.run_module({module!r}, run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.parametrize(
    "given, told",
    [
        (["jobs", "--patience", "nan"], "'nan' is no time in seconds"),
        (["calibrate", "--seconds", "-1"], "'-1' is no time in seconds"),
        (["optimize", "a:b", "--name", "\udcff"], "is not UTF-8"),
        (["optimize", "a:b", "--label", "\udcff=1"], "is not UTF-8"),
        (["optimize", "a:b", "--where", "a b=1"], "must be named by up to 63 letters, digits or ._/-"),
        (["optimize", "a:b", "--namespace", "a b/c"], "'a b/c' is no namespace"),
        (["optimize", "a:b", "--min-gain", "-2"], "-2.0 is not in 0 to 10"),
        (["optimize", "a:b", "--confidence", "2"], "2.0 is not in 0.5 to 0.9999"),
        (["optimize", "a:b", "--budget", "0"], "0.0 is not in 1 to 86400 seconds"),
        (["optimize", "a:b", "--deadline", "0"], "must be positive"),
        (["optimize", "a:b", "--max-relative-error", "nan"], "nan is not in 0 to 1"),
        (["jobs", "--token-file", "nosuch"], "there is no such file"),
        (["jobs", "--tls-ca", "nosuch"], "there is no such file"),
        (["jobs", "--tls-ca", "/"], "there is no such file"),
        (["dashboard", "--zoo", "nosuch"], "there is no such folder"),
    ],
)
def test_a_value_that_would_fail_later_is_refused_by_its_name(fxlib: Run, given: list[str], told: str) -> None:
    ran = fxlib(*given)
    assert ran.code == 2
    assert given[-2] in ran.err
    assert told in ran.err


@pytest.mark.parametrize(
    "given",
    [
        ["optimize", "a:b", "--save"],
        ["optimize", "a:b", "--report"],
        ["profile", "a:b", "-o"],
        ["draw", "net.fxg", "-o"],
        ["calibrate", "-o"],
        ["dashboard", "--ready-file"],
    ],
)
def test_a_folder_is_no_file_to_write(fxlib: Run, tmp_path: Path, given: list[str]) -> None:
    ran = fxlib(*given, str(tmp_path))
    assert (ran.code, f"{tmp_path} is a folder" in ran.err) == (2, True)


def test_a_recipe_that_needs_the_weights_is_refused_without_them(fxlib: Run) -> None:
    ran = fxlib("optimize", "a:b", "--recipe", "inference", "--no-weights")
    assert ran.code == 2
    assert ran.err.startswith("fxlib: --no-weights: the pass fold_norms needs the weights")


def test_a_value_nested_too_deeply_is_a_text(fxlib: Run) -> None:
    ran = fxlib("optimize", "a:b", "--pass", "decompose:operators=" + "[" * 100_000)
    assert (ran.code, "Traceback" in ran.err) == (2, False)
