"""A Chromium without a window. Modules that import this are skipped where selenium or a browser is missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["headless_chromium", "prefer_theme"]

_webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")
if _CHROMIUM is None or _DRIVER is None:
    pytest.skip("chromium or chromedriver is not installed", allow_module_level=True)


@contextlib.contextmanager
def headless_chromium(*arguments: str, recorded: bool = False) -> Iterator[Any]:
    """Yield a driver of Chromium, started with more arguments; its console and network may be recorded."""
    options = _webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    if recorded:
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = _webdriver.Chrome(options=options, service=_webdriver.ChromeService(_DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def prefer_theme(driver: Any, name: str) -> None:
    """Let pages see the light or the dark theme, as if the system had switched to it."""
    feature = {"name": "prefers-color-scheme", "value": name}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
