"""A shell completes commands, options, recipes, passes, reasons and files."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxlib.cli import main

LINES = {
    "": {"optimize", "jobs", "zoo", "completion"},
    "opt": {"optimize"},
    "jobs ": {"list", "show", "watch", "cancel"},
    "jobs --sta": {"--state"},
    "jobs list --state ca": {"cancelled"},
    "optimize --rec": {"--recipe"},
    "optimize --recipe in": {"inference", "int8"},
    "optimize --pass split_c": {"split_calls"},
    "show --diff sch": {"schedule"},
    "show zoo-m": {"zoo-manifest.toml"},
    "zoo run zoo-m": {"zoo-manifest.toml"},
    "zoo run zoo-manifest.toml --max-p": {"--max-parallel"},
    "reasons NOT_F": {"NOT_FASTER", "NOT_FINITE"},
    "serve --max-q": {"--max-queued"},
    "serve --no-w": {"--no-worker"},
    "worker --lab": {"--label"},
}


def in_bash(script: Path, folder: Path) -> Iterator[set[str]]:
    ask = """
    source "$1"; shift
    for line; do
        eval "COMP_WORDS=($line)"; [[ $line == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
        _shtab_fxlib fxlib "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        echo "${COMPREPLY[*]}"
    done
    """
    yield from asked(["bash", "-c", ask, "bash", str(script)], folder)


def in_fish(script: Path, folder: Path) -> Iterator[set[str]]:
    told = "string join -- ' ' (complete -C $line | string split -f1 \\t)"
    ask = f"source {script}; for line in $argv; {told}; end; true"
    yield from asked(["fish", "--no-config", "-c", ask], folder)


def asked(command: list[str], folder: Path) -> Iterator[set[str]]:
    lines = [f"fxlib {line}" for line in LINES]
    ran = subprocess.run([*command, *lines], check=True, capture_output=True, text=True, cwd=folder)
    assert ran.stderr == ""
    yield from (set(line.split()) for line in ran.stdout.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("completion")
    (made / "zoo-manifest.toml").touch()
    return made


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs `{shell}`")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("fish", marks=needs("fish")), pytest.param("zsh", marks=needs("zsh"))]
)
def test_a_shell_completes_what_there_is(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = folder / shell
    script.write_text(capsys.readouterr().out)
    if shell == "zsh":  # which completes in a terminal alone
        subprocess.run(["zsh", "-n", str(script)], check=True)
        return
    found = (in_bash if shell == "bash" else in_fish)(script, folder)
    for line, (wanted, words) in zip(LINES, zip(LINES.values(), found, strict=True), strict=True):
        assert words >= wanted if line in ("", "jobs ") else words == wanted, line
