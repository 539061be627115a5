"""Options that are declared once are read from a flag, a variable or a file."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fxlib.errors import OptionError
from fxlib.utils.settings import COUNT, FILE, GIBIBYTES, SECONDS, Application, group, option


@dataclass(frozen=True, kw_only=True)
class Pair:
    first: Path = field(metadata=option("first", "one of two", FILE))
    second: Path = field(metadata=option("second", "the other", FILE))


@dataclass(frozen=True, kw_only=True)
class Settings:
    wait_s: float = field(default=1.5, metadata=option("wait-seconds", "a while", SECONDS))
    parts: int = field(default=2, metadata=option("parts", "how many", COUNT))
    loud: bool = field(default=False, metadata=option("loud", "say it", kind=None))
    words: tuple[str, ...] = field(default=(), metadata=option("word", "what to say", repeatable=True))
    pair: Pair | None = field(default=None, metadata=group(Pair))
    fixed: int = 7

    def __post_init__(self) -> None:
        if self.parts > self.wait_s * 10:
            raise OptionError("too many", option="parts", hint="Wait longer.")


APPLICATION = Application(command="worker", program="program", description="A program.", config=Settings)


def read(*arguments: str, **environment: str) -> Settings:
    return APPLICATION.read(arguments, environment)


def written(folder: Path, text: str) -> str:
    file = folder / "f.toml"
    file.write_text(text)
    return str(file)


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "[worker]\nparts = 3\nwait-seconds = 4\nloud = true\n")
    assert read(FXLIB_CONFIG=file) == Settings(parts=3, wait_s=4.0, loud=True)
    variables = {"FXLIB_WORKER_PARTS": "5", "FXLIB_WORKER_LOUD": "0"}
    assert read("--config", file, **variables) == Settings(parts=5, wait_s=4.0)
    assert read("--config", file, "--parts", "6", "--loud", **variables) == Settings(parts=6, wait_s=4.0, loud=True)


def test_a_repeatable_option_is_several_flags_a_list_or_an_array(tmp_path: Path) -> None:
    file = written(tmp_path, '[worker]\nword = ["a", "b"]\n')
    told = [read("--word", "a", "--word", "b"), read(FXLIB_WORKER_WORD="a, b"), read("--config", file)]
    assert told == [Settings(words=("a", "b"))] * 3


def test_an_empty_variable_says_nothing() -> None:
    assert read(FXLIB_WORKER_PARTS="") == Settings()


def test_a_group_is_there_if_one_of_its_options_is_and_then_whole() -> None:
    assert read("--first", "a", "--second", "b").pair == Pair(first=Path("a"), second=Path("b"))
    with pytest.raises(OptionError, match=r"^FXLIB_WORKER_SECOND: it needs --first, too"):
        read(FXLIB_WORKER_SECOND="b")


@pytest.mark.parametrize(
    "text, says",
    [
        ("parts = 0", ":worker.parts: 0 is not positive"),
        (f"parts = {2**63}", f":worker.parts: {2**63} is more than {2**63 - 1}"),
        ("parts = 1.5", ":worker.parts: 1.5 is not a number of the kind"),
        ("parts = '3'", ":worker.parts: '3' is not a number of the kind"),
        ("wait-seconds = nan", ":worker.wait-seconds: nan is not finite"),
        ("loud = 1", ":worker.loud: 1 is neither true nor false"),
        ("word = 'a'", ":worker.word: 'a' is not an array"),
        ("first = 1", ":worker.first: 1 is not a text"),
        ("wait_seconds = 3", r":worker.wait_seconds: there is no such option. Did you mean wait-seconds\?"),
        ("parts = 90", ":worker.parts: too many. Wait longer."),
        ("parts = ", ": it is not TOML"),
        ("parts = " + "[" * 5_000, ": it is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    file = written(tmp_path, f"[worker]\n{text}\n")
    with pytest.raises(OptionError, match=f"^{file}{says}"):
        read("--config", file)


def test_a_table_that_there_is_not_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"workers: there is no such table. Did you mean worker"):
        read("--config", written(tmp_path, "[workers]\nparts = 3\n"))
    with pytest.raises(OptionError, match="No such file"):
        read("--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    "variable, value, says",
    [("PARTS", "many", "'many' is not a whole number"), ("LOUD", "maybe", "'maybe' is neither 1 nor 0")],
)
def test_what_is_wrong_in_a_variable_is_told_with_its_name(variable: str, value: str, says: str) -> None:
    with pytest.raises(OptionError, match=f"^FXLIB_WORKER_{variable}: {says}"):
        read(**{f"FXLIB_WORKER_{variable}": value})


def test_a_wrong_flag_is_told_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--wait-seconds", "-1")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: program")
    assert "argument --wait-seconds: -1 is not positive" in told


def test_the_options_in_force_are_printed_with_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--parts", "3", "--print-options", FXLIB_WORKER_LOUD="1")
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parts"] == {"value": "3", "from": "--parts"}
    assert told["loud"] == {"value": True, "from": "FXLIB_WORKER_LOUD"}
    assert told["wait-seconds"] == {"value": "1.5", "from": "default"}
    assert told["first"] == {"value": None, "from": "default"}
    assert "fixed" not in told


@pytest.mark.parametrize("text", ["1e308", "inf", "nan", "-1", "0", "1_", "x"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"finite|positive|not a number"):
        GIBIBYTES.read(text)
