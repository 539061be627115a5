"""The runs of a zoo, as folders and files: which is the newest, whatever the clock says, and what a row keeps."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fxlib.spec.report import Estimate
from fxlib.zoo import Row, Runs
from fxlib.zoo.runs import Replica, RunError

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def begin(runs: Runs, *after: timedelta) -> list[str]:
    return [runs.begin("zoo.toml", ["a"], now=NOON + each).name for each in after]


def test_a_run_that_began_after_the_clock_was_set_back_is_the_newest(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    names = begin(runs, timedelta(days=9), timedelta(0), timedelta(hours=-5), timedelta(days=9), timedelta(days=10))
    ahead = "20261201T120000Z"
    assert names == [ahead, f"{ahead}-1", f"{ahead}-2", f"{ahead}-3", "20261202T120000Z"]
    assert [each.name for each in runs] == names
    assert runs.named("latest").name == names[-1]
    assert [each.name for each in runs.before(runs.named(names[2]))] == [names[1], names[0]]


def test_runs_that_begin_in_one_second_follow_each_other_beyond_the_tenth(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    names = begin(runs, *[timedelta(0)] * 12)
    assert [each.name for each in runs] == names
    assert names[-1] == "20261122T120000Z-11"


def test_a_run_that_somebody_renamed_is_found_and_is_not_the_newest(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    (tmp_path / begin(runs, timedelta(0))[0]).rename(tmp_path / "release-9")
    names = begin(runs, timedelta(0), timedelta(0))
    assert runs.named("latest").name == names[-1]
    assert runs.named("release").name == "release-9"
    assert [each.name for each in runs] == ["release-9", *names]
    with pytest.raises(RunError, match="several runs begin with '2026'"):
        runs.named("2026")


def test_a_row_of_several_machines_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Runs(tmp_path).begin("zoo.toml", ["a", "b"])
    gain = Estimate(value=0.2, low=0.1, high=0.3)
    there = Replica(where={"rack": "1"}, job_id="one", worker="w", hardware="h", decision="adopt", gain=gain)
    several = Row(name="a", state="done", gain=gain, replicas=(there, Replica(where={"rack": "2"}, job_id="two")))
    single = Row(name="b", state="asked", job_id="three")
    for row in (several, single):
        run.write(row)
    assert run.rows() == [several, single]
    assert [row.job_ids for row in run.rows()] == [("one", "two"), ("three",)]
    (file,) = (run.folder / "rows").glob("b-*")
    assert "replicas" not in file.read_text()  # which earlier releases cannot read
