"""A dashboard in a process of its own, and a real browser that looks at it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.dashboard.support import Served
from tests.shared.forked import Module

_CHROMIUM, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if _CHROMIUM and _DRIVER else "chromium or chromium-driver is not installed (make system)"
"""Why there is no browser here; empty if there is one."""
PATIENCE_S = 100.0


@contextmanager
def dashboard(service: Served, folder: Path, *more: str) -> Iterator[str]:
    """Run `fxlib dashboard` on a free port, and give its address."""
    ready = folder / "ready"
    options = ["--service", service.address, "--token-file", str(service.viewer), "--patience", "2", *more]
    process = Module(
        "fxlib.cli", "dashboard", *options, "--listen", "127.0.0.1:0", "--ready-file", str(ready), log=folder / "log"
    )
    try:
        address = f"http://{process.until_written(ready).strip()}"
        assert f": {address}/ (" in (folder / "log").read_text()
        yield address
    finally:
        process.end()


@contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(_CHROMIUM)
    quiet = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-component-update", *quiet):
        options.add_argument(option)
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=_DRIVER))
    driver.set_page_load_timeout(PATIENCE_S)
    try:
        yield driver
    finally:
        driver.quit()


def until(browser: webdriver.Chrome, text: str) -> None:
    WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[Exception]).until(
        lambda found: text in found.find_element(By.TAG_NAME, "body").text, f"{text!r} on the page"
    )


def look_for_strangers(browser: webdriver.Chrome, *, letters: str, scripts: int = 1) -> None:
    """Check that text of strangers is shown, does nothing, and turns no text but its own around."""
    until(browser, "<script>")
    assert browser.title != "hit"
    assert len(browser.find_elements(By.TAG_NAME, "script")) == scripts
    assert browser.find_elements(By.CSS_SELECTOR, "img, [onerror]") == []
    assert not any(each in browser.page_source for each in "\u202e\u2066\x1b")
    within = "self::bdi or self::option or self::input or self::title or self::pre"
    assert browser.find_elements(By.XPATH, f"//body//text()[contains(., '{letters}')]/..") != []
    beside = f"//body//*[text()[contains(., '{letters}')]][not(ancestor-or-self::*[{within}])]"
    assert [each.get_attribute("outerHTML") for each in browser.find_elements(By.XPATH, beside)] == []
