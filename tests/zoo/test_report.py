"""The site of a run: what it holds, what is inert in it, and that a browser shows and filters it."""

import errno
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from fxlib.serialization.files import write_whole
from fxlib.spec.report import Estimate
from fxlib.zoo import Row, Run, Runs, report
from fxlib.zoo.report import results, write_site
from fxlib.zoo.runs import Replica, RunError
from tests.dashboard.browser import MISSING, chromium, look_for_strangers, until
from tests.dashboard.support import HOSTILE as NAME
from tests.dashboard.support import RIGHT_TO_LEFT, STEERING

pytestmark = pytest.mark.slow

HOSTILE = NAME + STEERING


def made(folder: Path, rows: list[Row]) -> Run:
    run = Runs(folder / "zoo.runs").begin("zoo.toml", [row.name for row in rows])
    for row in rows:
        run.write(row)
    return run


def adopted(name: str, gain: float = 0.5) -> Row:
    estimate = Estimate(value=gain, low=gain - 0.01, high=gain + 0.01)
    return Row(name=name, state="done", decision="adopt", reason="FASTER", explanation="faster", gain=estimate)


class Tags(HTMLParser):
    """Collects the tags of a page, and checks that they are balanced."""

    VOID = frozenset(("meta", "input", "rect", "line", "br", "option"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_a_site_has_a_leaderboard_and_a_page_for_each_model(tmp_path: Path) -> None:
    failed = Row(name="broken", state="failed", failure="CRASHED", explanation="it crashed", expected=False)
    run = made(tmp_path, [adopted("slow", 0.1), adopted("fast", 0.9), failed])
    run.log("broken").write_text("Traceback: boom")
    written = write_site(run, [], tmp_path / "site")
    index = (tmp_path / "site" / "index.html").read_text()
    assert len(written) == 5
    assert index.index("fast") < index.index("slow") < index.index("broken")
    assert "failed, not expected" in index
    assert "Traceback: boom" in (tmp_path / "site" / "models" / f"{run.slug('broken')}.html").read_text()
    links = re.findall(r'href="(models/[^"]+)"', index)
    assert all((tmp_path / "site" / each).is_file() for each in links)
    assert json.loads((tmp_path / "site" / "results.json").read_text()) == results(run)


def test_names_and_sentences_are_inert(tmp_path: Path) -> None:
    there = Replica(where={"rack": HOSTILE}, job_id=HOSTILE, worker=HOSTILE, hardware=HOSTILE, reason=HOSTILE)
    run = made(
        tmp_path, [Row(name=HOSTILE, state="failed", failure="MODEL", explanation=HOSTILE, replicas=(there, there))]
    )
    run.log(HOSTILE).write_text(HOSTILE)
    for path in write_site(run, [], tmp_path / "site"):
        if path.suffix == ".html":
            text = path.read_text()
            assert "<script>document" not in text
            assert "49" not in re.sub(r"[0-9a-f]{8}", "", text.replace(run.name, ""))
            assert Tags(text).seen.count("script") <= 1


def test_a_page_shows_earlier_runs_and_what_changed(tmp_path: Path) -> None:
    before = made(tmp_path, [adopted("a", 0.9)])
    run = made(tmp_path, [adopted("a", 0.2)])
    write_site(run, [before], tmp_path / "site")
    assert "slower" in (tmp_path / "site" / "index.html").read_text()
    assert before.name in (tmp_path / "site" / "models" / f"{run.slug('a')}.html").read_text()


def test_a_report_of_another_form_is_a_sentence(tmp_path: Path) -> None:
    run = made(tmp_path, [adopted("a")])
    run.write_report("a", {"decision": 3, "calls": 3})
    with pytest.raises(RunError, match="the report on 'a' is of another form"):
        write_site(run, [], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "site").write_text("a file")
    with pytest.raises(RunError, match="site"):
        write_site(made(tmp_path, [adopted("a")]), [], tmp_path / "site")


def test_a_disk_that_is_full_leaves_an_index_that_names_no_missing_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, site = made(tmp_path, [adopted("a"), adopted("b")]), tmp_path / "site"
    room = 2

    def full_after_two(target: Path, parts: Iterable[bytes]) -> None:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        room -= 1
        write_whole(target, parts)

    monkeypatch.setattr(report, "write_whole", full_after_two)
    with pytest.raises(RunError, match="No space left on device"):
        write_site(run, [], site)
    assert len(list((site / "models").iterdir())) == 2
    assert not (site / "index.html").exists()


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there")
def test_a_browser_filters_and_sorts_the_leaderboard_and_runs_no_script_but_ours(tmp_path: Path) -> None:
    failed = Row(name=HOSTILE, state="failed", failure=HOSTILE, explanation=HOSTILE, recipe=HOSTILE, job_id=HOSTILE)
    kept = Row(name="kept", state="done", decision="keep_original", reason="NOT_FASTER", explanation="no faster")
    rows = [adopted("fast", 0.9), adopted("slow", 0.1), adopted("slower", -0.2), failed, kept]
    run, site = made(tmp_path, rows), tmp_path / "site"
    run.log(HOSTILE).write_text(HOSTILE)
    write_site(run, [made(tmp_path, rows[:3])], site)
    # The page's own script is allowed by its hash, one that somebody smuggled in is not.
    text = (site / "index.html").read_text().replace("</body>", "<script>document.title='smuggled'</script></body>")
    (site / "index.html").write_text(text)
    with chromium(tmp_path) as browser:
        browser.get((site / "index.html").as_uri())

        def shown() -> list[str]:
            found = browser.find_elements(By.CSS_SELECTOR, "#models tbody tr")
            return [row.find_element(By.TAG_NAME, "a").text[:6] for row in found if row.is_displayed()]

        look_for_strangers(browser, letters=RIGHT_TO_LEFT, scripts=2)
        assert browser.title == f"Zoo run {run.name}"
        assert shown() == ["fast", "slow", "slower", "<scrip", "kept"]
        gain = browser.find_element(By.XPATH, "//th/button[text()='gain']")
        gain.click()
        assert shown() == ["slower", "slow", "fast", "<scrip", "kept"]  # what has no figure stays at the end
        gain.send_keys(Keys.ENTER)
        assert shown() == ["fast", "slow", "slower", "<scrip", "kept"]
        assert gain.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
        browser.find_element(By.XPATH, "//th/button[text()='model']").click()
        assert shown() == ["<scrip", "fast", "kept", "slow", "slower"]
        browser.find_element(By.ID, "filter").send_keys("SLOW")
        assert shown() == ["slow", "slower"]
        browser.find_element(By.ID, "filter").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
        browser.find_element(By.XPATH, "//select[@id='outcome']/option[text()='failed']").click()
        assert shown() == ["<scrip"]
        # The cells beside a name that is read from the right stay where they are.
        cells = browser.find_elements(By.CSS_SELECTOR, "#models tbody tr:not([hidden]) td")
        assert [cell.location["x"] for cell in cells] == sorted(cell.location["x"] for cell in cells)
        cells[0].find_element(By.TAG_NAME, "a").click()
        look_for_strangers(browser, letters=RIGHT_TO_LEFT, scripts=0)
        browser.back()
        until(browser, "By reason")
