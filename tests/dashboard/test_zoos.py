"""Runs of zoos on the dashboard: what is shown of them, and what a visitor's names cannot reach."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fxlib import connect
from fxlib.cli import main
from fxlib.dashboard.app import make_app
from fxlib.dashboard.zoos import Zoos
from fxlib.zoo import Row, Run, Runs
from fxlib.zoo.runs import Replica
from tests.dashboard.support import HOSTILE, STEERING, measured

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
FIRST, SECOND = "20261122T120000Z", "20261122T120001Z"


def made(folder: Path, *rows: Row, second: int = 0) -> Run:
    run = Runs(folder).begin("zoo.toml", [row.name for row in rows], now=NOON + timedelta(seconds=second))
    for row in rows:
        run.write(row)
    return run


@contextmanager
def browsing(*folders: Path) -> Iterator[TestClient]:
    """A browser at a dashboard whose service is away."""
    app = make_app(connect("127.0.0.1:9", patience_s=0.1), hosts=["localhost"], zoos=folders)
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as found:
        yield found


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    folder = tmp_path / "vision.runs"
    broken = Row(name="broken", state="failed", failure="CRASHED", explanation="it crashed", expected=False)
    made(folder, measured("fast", 0.5, "job-1"), measured("slow", 0.1))
    made(folder, measured("fast", 0.3, "job-2"), measured("slow", 0.11), broken, second=1)
    return folder


def test_runs_are_listed_with_what_became_of_their_models(vision: Path, tmp_path: Path) -> None:
    (tmp_path / "text.runs").mkdir()
    with browsing(vision, tmp_path / "text.runs") as browser:
        told = browser.get("/zoo.json").json()["zoos"]
        page = browser.get("/zoo").text
    assert [(zoo["zoo"], zoo["of"]) for zoo in told] == [("vision", 2), ("text", 0)]
    newest, first = told[0]["runs"]
    assert (newest["run"], newest["counts"], newest["unexpected"]) == (SECOND, {"adopted": 2, "failed": 1}, 1)
    assert (first["run"], first["counts"], first["over"]) == (FIRST, {"adopted": 2}, True)
    assert f'href="/zoo/{SECOND}?zoo=vision"' in page
    assert f'href="/zoo/diff?zoo=vision&amp;a=&amp;b={SECOND}"' in page
    assert "no run yet" in page
    assert 'aria-current="page">Zoos</a>' in page


def test_a_run_shows_its_models_by_gain_and_leads_to_their_jobs(vision: Path) -> None:
    with browsing(vision) as browser:
        told = browser.get(f"/zoo/{SECOND}.json").json()
        page = browser.get(f"/zoo/{SECOND}?zoo=vision").text
        failed = browser.get(f"/zoo/{SECOND}?outcome=failed").text
        named = browser.get(f"/zoo/{SECOND}.json?name=slo").json()
    assert [row["name"] for row in told["rows"]] == ["fast", "slow", "broken"]
    assert (told["zoo"], told["since"]["run"]) == ("vision", FIRST)
    assert 'href="/jobs/job-2"' in page
    assert "+30.0%" in page
    assert "CRASHED: it crashed" in failed
    assert "<bdi>fast</bdi>" not in failed
    assert [row["name"] for row in named["rows"]] == ["slow"]


@pytest.mark.parametrize("query", ["", f"?b={SECOND}", f"?a={FIRST}", f"?a={FIRST}&b={SECOND}&zoo=vision"])
def test_two_runs_are_compared_as_the_command_does(
    vision: Path, query: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with browsing(vision) as browser:
        told = browser.get(f"/zoo/diff.json{query}").json()
        page = browser.get(f"/zoo/diff{query}").text
    (vision.parent / "vision.toml").touch()
    assert main(["zoo", "diff", str(vision.parent / "vision.toml"), FIRST, SECOND, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: told[name] for name in shown} == shown
    assert told["regressions"] == ["fast"]
    assert '<td class="failed">slower</td>' in page
    assert "1 of all are worse" in page
    assert f"<option selected>{FIRST}</option>" in page


def test_a_run_of_two_zoos_is_asked_which(vision: Path, tmp_path: Path) -> None:
    made(tmp_path / "text.runs", measured("bert", 0.2))
    with browsing(vision, tmp_path / "text.runs") as browser:
        asked = browser.get(f"/zoo/{FIRST}")
        assert asked.status_code == 404
        assert "Say of which zoo" in asked.text
        assert browser.get(f"/zoo/{FIRST}.json?zoo=text").json()["rows"][0]["name"] == "bert"
        assert browser.get(f"/zoo/{SECOND}.json").json()["zoo"] == "vision"


@pytest.mark.parametrize(
    "address",
    [
        "/zoo/{0}",
        "/zoo/..%2Fsecret.runs%2F{1}",
        "/zoo/%2E%2E",
        "/zoo/latest",
        "/zoo/20261122",
        "/zoo/diff?a={0}",
        "/zoo/diff?b=../secret.runs/{1}",
        "/zoo/diff?zoo=../secret&b={1}",
        "/zoo/diff?zoo=secret",
        "/zoo/{1}?zoo=/",
        "/zoo/diff?a=%00&b=%0a",
    ],
)
def test_no_name_reaches_outside_of_the_folders(vision: Path, tmp_path: Path, address: str) -> None:
    secret = made(tmp_path / "secret.runs", measured("hidden", 0.5), second=9)
    with browsing(vision) as browser:
        answered = browser.get(address.format(secret.folder, secret.name))
    assert answered.status_code == 404
    assert "hidden" not in answered.text


def test_names_of_strangers_are_inert_on_pages_of_zoos(tmp_path: Path) -> None:
    folder, name = tmp_path / f"{HOSTILE.replace('/', '')}.runs", HOSTILE + STEERING
    for gain in (0.5, 0.2):
        failed = Row(name="2" + name, state="failed", failure=name, explanation=name, recipe=name, job_id=name)
        run = Runs(folder).begin(name, [name, failed.name])
        there = Replica(where={"rack": name}, job_id="job-3", worker=name, hardware=name, reason=name)
        run.write(replace(measured(name, gain), replicas=(there, replace(there, gain=measured("", gain).gain))))
        run.write(failed)
    with browsing(folder) as browser:
        links = re.findall(r'href="(/zoo[/?][^"]+)"', browser.get("/zoo").text)
        assert len(links) == 3
        for path in ("/zoo", *(each.replace("&amp;", "&") for each in links), "/zoo/diff?a='%20OR%201=1--<script>"):
            text = browser.get(path).text
            assert "&lt;script&gt;" in text
            assert "<img" not in text
            assert text.count("<script") == text.count("</script>") == 1
            data = browser.get(path, headers={"accept": "application/json"}).text
            assert not any(each in text + data for each in "\u202e\x1b\u2066")


def test_a_run_that_cannot_be_read_is_told_beside_the_others(vision: Path) -> None:
    (vision / FIRST / "run.json").write_text("{")
    with browsing(vision) as browser:
        newest, first = browser.get("/zoo.json").json()["zoos"][0]["runs"]
        assert "it is no file of a run" in first["error"]
        assert newest["models"] == 3
        assert "it is no file of a run" in browser.get("/zoo").text
        assert browser.get(f"/zoo/{FIRST}").status_code == 500


def test_a_run_that_goes_on_is_told_and_one_that_does_not_is_not_read_again(
    vision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxlib.dashboard.zoos._SETTLED_NS", -1)
    zoos, run = Zoos([vision]), Runs(vision).named(SECOND)
    before, _ = zoos.fingerprint(), zoos.all()
    run.write(measured("broken", 0.2))
    assert zoos.fingerprint() != before
    read = list[str]()

    def rows(self: Run) -> list[Row]:
        read.append(self.name)
        return []

    monkeypatch.setattr(Run, "rows", rows)
    zoos.forget()
    zoos.all()
    assert read == [SECOND]


def test_a_folder_that_is_not_there_or_a_name_given_twice_is_told_at_the_start(
    vision: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = tmp_path / "other" / "vision"
    twice.mkdir(parents=True)
    for folders, says in (([tmp_path / "none"], "there is no such folder"), ([vision, twice], "two zoos are called")):
        options = [option for folder in folders for option in ("--zoo", str(folder))]
        assert main(["dashboard", "--listen", "127.0.0.1:0", *options]) == 2
        assert says in capsys.readouterr().err


def test_without_zoos_no_entry_leads_to_them() -> None:
    with browsing() as browser:
        assert "--zoo DIR" in browser.get("/zoo").text
        assert 'href="/zoo"' not in browser.get("/zoo").text
