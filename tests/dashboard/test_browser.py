"""The dashboard in a real browser: live updates, going back, the keyboard, a narrow window, dark mode, many jobs."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.dashboard.browser import MISSING, chromium, dashboard, until
from tests.dashboard.support import HOSTILE, STEERING, Served, served
from tests.service.principals import token
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
    job_id = service.answered(HOSTILE)
    for path in ("/jobs", f"/jobs/{job_id}", "/models"):
        browser.get(address + path)
        until(browser, "<script>")
        assert browser.title != "hit"
        assert len(browser.find_elements(By.TAG_NAME, "script")) == 1
        assert browser.find_elements(By.CSS_SELECTOR, "img, [onerror]") == []


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
