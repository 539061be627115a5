"""The pictures of the dashboard's page in the docs: a test takes them, of a service with jobs as one has them.

`make screenshots` has it write them where they are committed.
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from fxlib.v1 import jobs_pb2
from tests.dashboard.browser import MISSING, chromium, dashboard, until
from tests.dashboard.support import Served, served
from tests.service.support import answer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "dashboard.md"
COMMITTED = PAGE.parent / "dashboard"
FOLDER = "FXLIB_SCREENSHOTS"
"""The environment variable that says where the pictures go; without it they are only looked at."""
WIDTH = 860
MOST_BYTES = 100 << 10
LOOKUP_S, LOCAL_S = 0.005, 0.008
TABLES = 4
GAINS = (0.31, 0.34, 0.33, 0.52, 0.55, 0.54)

VIEWS = {
    "workers": ("/", "cpu-8-avx512", 420),
    "jobs": ("/jobs", "retrieval", 640),
    "job": ("/jobs/{job}", "One step", 880),
    "model": ("/model?namespace=default&name=ranker", "in training", 640),
}
"""The path of each picture's page, what it shows once it is there, and the picture's height.

Where that is a heading, the picture begins with it.
"""


def test_the_page_of_the_docs_shows_each_picture() -> None:
    named = re.findall(r"!\[[^\]]+\]\(dashboard/([\w-]+\.png)\)", PAGE.read_text())
    assert sorted(named) == sorted(f"{name}.png" for name in VIEWS)
    assert sorted(named) == sorted(path.name for path in COMMITTED.iterdir())
    for name, (_, _, height) in VIEWS.items():
        check((COMMITTED / f"{name}.png").read_bytes(), height)


def check(picture: bytes, height: int) -> None:
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (WIDTH, height)
    assert len(picture) < MOST_BYTES


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there")
def test_pictures_are_taken_of_what_the_pages_show(service: Served, tmp_path: Path) -> None:
    job_id = fill(service)
    folder = Path(os.environ.get(FOLDER, tmp_path))
    with dashboard(service, tmp_path) as address, chromium(tmp_path) as browser:
        for name, (path, shows, height) in VIEWS.items():
            size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(address + path.format(job=job_id))
            until(browser, shows)
            picture = take(browser, shows)
            (folder / f"{name}.png").write_bytes(picture)
            check(picture, height)


def take(browser: webdriver.Chrome, heading: str) -> bytes:
    """Take a picture of the page, in light colours whatever the machine's are, and without bars to scroll by."""
    wanted = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    for each in browser.find_elements(By.XPATH, f"//h2[text()='{heading}']"):
        browser.execute_script("arguments[0].scrollIntoView()", each)
    return browser.get_screenshot_as_png()


def fill(service: Served) -> str:
    """Have jobs measured, one running and some waiting; return the id of the one with the most to show."""
    service.answered("tower", answer(gain=0.004, reason="NOT_FASTER", calls=0))
    service.answered("retrieval", answer(gain=0.22))
    for gain in GAINS:
        job_id = service.answered("ranker", measured(gain))
    gain_seen = jobs_pb2.Estimate(value=0.51, low=0.48, high=0.53)
    live = jobs_pb2.LiveFigures(qps_original=1210, qps_optimized=1827, gain=gain_seen, steps=4200)
    service.owner.jobs.ReportLive(jobs_pb2.ReportLiveRequest(job_id=job_id, live=live), timeout=60)
    service.owner.submit(name="retrieval", labels={"team": "ads"})
    lease = service.claim("worker-1", hardware="cpu-8-avx512")
    service.report(lease, "two candidates are left")
    for name in ("tower", "ranker"):
        service.owner.submit(name=name, labels={"team": "search"})
    return job_id


def measured(gain: float) -> jobs_pb2.JobResult:
    """Return an answer as a trial gives one: lookups that waited for each other, and now are under way at once."""
    told = answer(gain=gain, calls=0)
    told.reason = "it is faster, and its results are the same bits"
    told.qps_original.CopyFrom(jobs_pb2.Estimate(value=1205, low=1190, high=1221))
    told.qps_optimized.CopyFrom(
        jobs_pb2.Estimate(value=1205 * (1 + gain), low=1195 * (1 + gain), high=1215 * (1 + gain))
    )
    told.max_relative_error, told.hardware, told.torch_version = 0.0, "cpu-8-avx512", "2.13.0"
    told.timeline_original.CopyFrom(in_turn())
    told.timeline_optimized.CopyFrom(at_once())
    told.candidates.add(name="schedule", gain=told.gain, verdict="chosen for its speed")
    told.candidates.add(name="one message a server", verdict="stopped: slower than another one")
    for index in range(TABLES):
        told.calls.add(
            node=f"lookup_{index}",
            function="fxlib.ps:lookup",
            to=f"ps{index % 2}",
            action="moved",
            exposed_before_s=LOOKUP_S,
            exposed_after_s=LOOKUP_S if index == 0 else 0.0,
            reason_code="MOVED",
            reason="it begins earlier, and is waited for where its rows are needed",
        )
    return told


def in_turn() -> jobs_pb2.Timeline:
    """Return a step whose lookups wait for each other."""
    spans = [
        jobs_pb2.Span(kind="call", name=f"lookup_{i}", to=f"ps{i % 2}", start_s=i * LOOKUP_S, end_s=(i + 1) * LOOKUP_S)
        for i in range(TABLES)
    ]
    return finished(spans, TABLES * LOOKUP_S)


def at_once() -> jobs_pb2.Timeline:
    """Return a step whose lookups are under way at the same time."""
    spans = [
        jobs_pb2.Span(kind="in_flight", name=f"lookup_{i}", to=f"ps{i % 2}", start_s=0.0, end_s=LOOKUP_S)
        for i in range(TABLES)
    ]
    spans.append(jobs_pb2.Span(kind="wait", name="lookup_0", to="ps0", start_s=0.0, end_s=LOOKUP_S))
    return finished(spans, LOOKUP_S)


def finished(spans: list[jobs_pb2.Span], start_s: float) -> jobs_pb2.Timeline:
    for number, kind in enumerate(("forward", "backward", "optimizer")):
        begun = start_s + number * LOCAL_S
        spans.append(jobs_pb2.Span(kind=kind, name=kind, start_s=begun, end_s=begun + LOCAL_S))
    return jobs_pb2.Timeline(step_s=start_s + 3 * LOCAL_S, spans=spans)
