"""A real browser for pages: what it asked for, and what it complained of."""

import json
import shutil
from contextlib import contextmanager

import pytest


@contextmanager
def opened():
    """Chromium without a window; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("needs Chromium and its chromedriver")
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1500"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield chromium
    finally:
        chromium.quit()


def requested(browser):
    """The addresses that were asked for since this was called last."""
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]
