"""The site of a run: what it holds, what is inert in it, and that a browser shows and filters it."""

import errno
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fxlib.serialization.files import write_whole
from fxlib.spec.report import Estimate
from fxlib.zoo import Row, Run, Runs, report
from fxlib.zoo.report import results, write_site
from fxlib.zoo.runs import RunError

HOSTILE = '<script>document.title="hit"</script>"\'&{{ 7*7 }}\u202egnp\x1b[31m'
CHROMIUM = shutil.which("chromium")


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
    run = made(tmp_path, [Row(name=HOSTILE, state="failed", failure="MODEL", explanation=HOSTILE)])
    run.log(HOSTILE).write_text(HOSTILE)
    for path in write_site(run, [], tmp_path / "site"):
        if path.suffix == ".html":
            text = path.read_text()
            assert "<script>document" not in text
            assert "49" not in re.sub(r"[0-9a-f]{8}", "", text)
            assert Tags(text).seen.count("script") <= 1


def test_a_page_shows_earlier_runs_and_what_changed(tmp_path: Path) -> None:
    before = made(tmp_path, [adopted("a", 0.9)])
    run = made(tmp_path, [adopted("a", 0.2)])
    write_site(run, [before], tmp_path / "site")
    assert "slower" in (tmp_path / "site" / "index.html").read_text()
    assert before.name in (tmp_path / "site" / "models" / f"{run.slug('a')}.html").read_text()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    from fxlib.zoo.runs import RunError

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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (make system)")
def test_a_browser_shows_the_leaderboard_and_runs_no_script_but_ours(tmp_path: Path) -> None:
    run = made(tmp_path, [adopted("fast"), Row(name=HOSTILE, state="failed", failure="MODEL", explanation="no")])
    write_site(run, [], tmp_path / "site")
    index = tmp_path / "site" / "index.html"
    # The page's own script is allowed by its hash, one that somebody smuggled in is not.
    text = index.read_text().replace("</body>", "<script>document.title='smuggled'</script></body>")
    index.write_text(text.replace("body.append", "body.dataset.sorted = 'yes'; body.append"))
    shown = _dom(index, tmp_path)
    assert "smuggled" not in shown.partition("</title>")[0]
    assert ">fast<" in shown


def _dom(page: Path, folder: Path) -> str:
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *quiet, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
