"""A Chromium without a window. Modules that import this are skipped where selenium or a browser is missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["headless_chromium", "prefer_theme", "serious_findings"]

_webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")
_AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
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


def serious_findings(driver: Any) -> list[str]:
    """Return what axe finds of serious or critical impact on the page, with the place; skips where axe is missing."""
    if not _AXE.exists():
        pytest.skip("axe-core is not installed: npm install --no-save axe-core")
    driver.execute_script(_AXE.read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "axe.run().then(arguments[0], (error) => arguments[0]({ error: String(error) }))"
    )
    return [
        f"{violation['id']}: {violation['help']} ({node['html'][:120]})"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
