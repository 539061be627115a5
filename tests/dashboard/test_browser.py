"""The dashboard in a real browser: live updates, going back, the keyboard, a narrow window, dark mode, many jobs."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib.zoo import Row, Runs
from tests.dashboard.browser import MISSING, PATIENCE_S, chromium, dashboard, look_for_strangers, until
from tests.dashboard.support import HOSTILE, RIGHT_TO_LEFT, STEERING, Served, measured, served
from tests.service.principals import token
from tests.service.support import answer, worker
from tests.shared.real_service import free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there")]
JOBS = 10_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(scope="module")
def address(service: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dashboard(service, tmp_path_factory.mktemp("dashboard")) as found:
        yield found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def browser(opened: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """The browser, which met nothing that the pages' policy forbids, and no error of our script."""
    opened.get_log("browser")
    yield opened
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    said = [each["message"] for each in opened.get_log("browser") if each["level"] == "SEVERE"]
    assert [each for each in said if "status of 503" not in each and "ERR_" not in each] == []


def test_a_job_s_page_follows_it_to_its_end_without_being_loaded_again(
    service: Served, address: str, browser: webdriver.Chrome
) -> None:
    job = service.owner.submit(name="followed")
    browser.get(f"{address}/jobs/{job.id}")
    until(browser, "live")
    browser.execute_script("window.loadedOnce = true")
    lease = service.claim("w1")
    service.report(lease, f"at half {HOSTILE}{STEERING}")
    until(browser, "at half <script>")
    service.owner.complete(lease)
    until(browser, "+50.0% [+40.0%, +60.0%]")
    assert browser.execute_script("return window.loadedOnce")
    assert browser.title == "followed: fxlib"


def test_lists_show_what_happens_elsewhere(service: Served, address: str, browser: webdriver.Chrome) -> None:
    browser.get(f"{address}/jobs")
    until(browser, "live")
    browser.find_element(By.ID, "name").send_keys("half-typed")
    browser.execute_script("window.loadedOnce = true")
    service.answered("came later")
    until(browser, "came later")
    assert browser.execute_script("return window.loadedOnce")
    assert browser.find_element(By.ID, "name").get_property("value") == "half-typed"
    assert browser.switch_to.active_element.get_attribute("id") == "name"


def test_back_leads_to_the_list_as_it_was_filtered(service: Served, address: str, browser: webdriver.Chrome) -> None:
    service.answered("to go back from")
    browser.get(f"{address}/jobs?name=to+go+back+from")
    browser.find_element(By.CSS_SELECTOR, "tbody a").click()
    until(browser, "Events")
    browser.back()
    until(browser, "Id begins with")
    assert browser.find_element(By.ID, "name").get_property("value") == "to go back from"
    assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1
    browser.forward()
    until(browser, "Events")


def test_the_keyboard_reaches_everything(service: Served, address: str, browser: webdriver.Chrome) -> None:
    job_id = service.answered("by keyboard")
    browser.get(f"{address}/jobs?name=by+keyboard")
    reached = list[str]()
    while len(reached) < 40:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
        reached.append(focused.get_attribute("href") or focused.get_attribute("id") or focused.tag_name)
        if reached[-1].endswith(f"/jobs/{job_id}"):
            break
    assert reached[0].endswith("#main")
    assert {"name", "namespace", "label", "id", "size", "button"} <= set(reached)
    focused.send_keys(Keys.ENTER)
    until(browser, "Events")
    assert browser.current_url == f"{address}/jobs/{job_id}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_narrow_window_and_all_can_be_read(
    service: Served, address: str, browser: webdriver.Chrome, scheme: str
) -> None:
    job_id = service.answered("W" * 200)
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    for path in ("/", "/queue", "/jobs", f"/jobs/{job_id}", "/models", f"/model?namespace=default&name={'W' * 200}"):
        browser.get(address + path)
        until(browser, "Workers")
        width = browser.execute_script("return document.scrollingElement.scrollWidth")
        assert width <= 360, path
        # Without a background of its own, the page has the canvas of its colour scheme.
        text = browser.execute_script("return getComputedStyle(document.body).color")
        assert text == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[scheme]


def test_names_of_strangers_do_nothing_in_a_browser(service: Served, address: str, browser: webdriver.Chrome) -> None:
    waits = service.owner.submit(name=HOSTILE, where={"rack": HOSTILE})
    job = service.owner.submit(name=HOSTILE, labels={"team": HOSTILE})
    who = worker(HOSTILE, hardware=HOSTILE + STEERING, labels={"rack": HOSTILE + "2"})
    lease = service.owner.workers.Claim(workers_pb2.ClaimRequest(worker=who), timeout=60).lease
    assert lease.job_id == job.id
    service.report(lease, HOSTILE + STEERING)
    beat = workers_pb2.HeartbeatRequest(job_id=lease.job_id, token=lease.token)
    for path in ("/", "/queue", "/jobs", f"/jobs/{job.id}", f"/jobs/{waits.id}"):
        service.owner.workers.Heartbeat(beat, timeout=60)  # beside other tests, a page may take a while
        browser.get(address + path)
        look_for_strangers(browser, letters=RIGHT_TO_LEFT)
    told = answer()
    told.reason = told.hardware = HOSTILE + STEERING
    told.notes.append(HOSTILE + STEERING)
    told.passes[0].name = told.calls[0].node = told.calls[0].reason = HOSTILE + STEERING
    service.owner.complete(lease, told)
    named = urlencode({"namespace": "default", "name": HOSTILE})
    for path in (f"/jobs/{job.id}", f"/jobs?{urlencode({'name': HOSTILE})}", "/models", f"/model?{named}"):
        browser.get(address + path)
        look_for_strangers(browser, letters=RIGHT_TO_LEFT)
    service.owner.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=waits.id), timeout=60)


def test_runs_of_zoos_are_followed_and_compared(service: Served, tmp_path: Path, browser: webdriver.Chrome) -> None:
    runs = Runs(tmp_path / "vision.runs")
    for gain in (0.5, 0.2):
        run = runs.begin("zoo.toml", ["ranker", HOSTILE])
        run.write(measured("ranker", gain))
    with dashboard(service, tmp_path, "--zoo", str(runs.folder)) as address:
        browser.get(f"{address}/")
        browser.find_element(By.LINK_TEXT, "Zoos").click()
        until(browser, "live")
        browser.execute_script("window.loadedOnce = true")
        run.write(Row(name=HOSTILE, state="failed", failure="MODEL", explanation=HOSTILE + STEERING, expected=False))
        counts = "//a[contains(., '{}')]/ancestor::tr/td[5]"
        WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[Exception]).until(
            lambda found: found.find_element(By.XPATH, counts.format(run.name)).text == "1"
        )
        assert browser.execute_script("return window.loadedOnce")
        browser.find_element(By.LINK_TEXT, run.name).click()
        until(browser, "1 adopted, 1 failed.")
        look_for_strangers(browser, letters=RIGHT_TO_LEFT)
        browser.find_element(By.ID, "name").send_keys("ranker", Keys.ENTER)
        WebDriverWait(browser, PATIENCE_S).until(
            lambda found: len(found.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1
        )
        browser.back()
        browser.find_element(By.PARTIAL_LINK_TEXT, "What changed since run").click()
        until(browser, "slower")
        look_for_strangers(browser, letters=RIGHT_TO_LEFT)
        assert browser.find_element(By.ID, "b").get_property("value") == run.name
        size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for path in ("/zoo", f"/zoo/{run.name}", "/zoo/diff"):
            browser.get(address + path)
            until(browser, "Workers")
            assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 360, path


def test_a_visitor_signs_in_and_cancels(service: Served, address: str, browser: webdriver.Chrome) -> None:
    job = service.owner.submit(name="cancelled here")
    browser.get(f"{address}/jobs/{job.id}")
    browser.find_element(By.LINK_TEXT, "Sign in").click()
    browser.find_element(By.ID, "token").send_keys(token("operator"), Keys.ENTER)
    until(browser, "cancelled here")
    assert browser.execute_script("return document.cookie") == ""
    browser.find_element(By.ID, "act").click()
    until(browser, "was cancelled")
    browser.find_element(By.XPATH, "//button[text()='Sign out']").click()
    until(browser, "Sign in")


def test_a_page_recovers_by_itself_when_the_service_is_back(tmp_path: Path, browser: webdriver.Chrome) -> None:
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    with served(tmp_path / "s", *listen) as service, dashboard(service, tmp_path) as address:
        browser.get(f"{address}/queue")
        until(browser, "Waiting, the oldest first")
        until(browser, "live")
        browser.execute_script("window.loadedOnce = true")
        service.process.kill()
        until(browser, "The service is away")
        with served(tmp_path / "s", *listen):
            until(browser, "Waiting, the oldest first")
        assert browser.execute_script("return window.loadedOnce")


def test_ten_thousand_jobs_are_looked_through(tmp_path: Path, browser: webdriver.Chrome) -> None:
    with served(tmp_path / "s") as service:
        service.answered("model")
    multiply(tmp_path / "s" / "service" / "service.sqlite", JOBS)
    with served(tmp_path / "s") as service, dashboard(service, tmp_path) as address:
        seen, began = list[float](), time.monotonic()
        browser.get(f"{address}/jobs?size=500")
        for _ in range(3):
            assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 500
            seen.append(time.monotonic() - began)
            began = time.monotonic()
            browser.find_element(By.LINK_TEXT, "The next page").click()
        browser.get(f"{address}/jobs?id=copy-00007")
        assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 100
        browser.get(f"{address}/models")
        until(browser, "newest 1000 answered jobs")
        print(f"{JOBS} jobs: pages of 500 in {', '.join(f'{each:.2f}' for each in seen)} s")


def multiply(database: Path, number: int) -> None:
    """Copy the only job of a stopped service, with its answer and its events, until there are so many."""
    with sqlite3.connect(database) as db:
        for table, key in (("jobs", "id"), ("payloads", "job_id"), ("events", "job_id")):
            rows = db.execute(f"select * from {table}")  # noqa: S608 - a name of ours
            names = [each[0] for each in rows.description]
            for row in rows.fetchall():
                told = dict(zip(names, row, strict=True))
                copies = [_copy(told, key, index) for index in range(number - 1)]
                marks = ", ".join(f":{name}" for name in copies[0])
                db.executemany(f"insert into {table} ({', '.join(copies[0])}) values ({marks})", copies)  # noqa: S608
    db.close()


def _copy(row: dict[str, object], key: str, index: int) -> dict[str, object]:
    name = f"copy-{index:07}"
    told = {column: value for column, value in row.items() if column != "number"} | {key: name}
    return told | {"request_id": name} if "request_id" in told else told
