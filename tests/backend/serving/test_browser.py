"""The status page in Chromium: 20 models under load, behind a token."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fault_provider import until
from headless_chromium import headless_chromium, prefer_theme, serious_findings
from served_models import Served, serving_under_load

from rlx_ort.serving.history import machine_facts

pytestmark = pytest.mark.chromium
MODELS, TOKEN, TAB, ENTER = 20, "open sesame", "\ue004", "\ue007"


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Served]:
    """Yield a server with a token and 20 models that clients ask all the time."""
    with serving_under_load(tmp_path, MODELS, TOKEN) as served:
        yield served


@pytest.fixture
def browser() -> Iterator[Any]:
    """Yield a Chromium without a window, whose console and network are recorded."""
    with headless_chromium("--window-size=1280,960", recorded=True) as driver:
        yield driver


def cells(browser: Any) -> dict[str, dict[str, str]]:
    """Return the texts of the table by model and column."""
    script = (
        "return [...document.querySelectorAll('.model')].map(row => [row.cells[0].textContent, [...row.cells].slice(1)"
    )
    script += ".map(cell => [cell.dataset.name, cell.textContent])])"
    return {name: dict(row) for name, row in browser.execute_script(script)}


def titles(browser: Any, inside: str) -> list[str]:
    """Return what the charts inside of an element say to a screen reader."""
    script = f"return [...document.querySelectorAll('{inside} [role=img]')].map(svg => svg.getAttribute('aria-label'))"
    return [str(title) for title in browser.execute_script(script)]


def waits(condition: Callable[[], object]) -> None:
    """Wait until the page shows something."""
    until(condition, 20.0, 0.05)


def brightness(browser: Any, scheme: str) -> float:
    """Return the mean of the background's colours where the system prefers a scheme."""
    prefer_theme(browser, scheme)
    script = "return getComputedStyle(document.documentElement).backgroundColor"
    numbers = str(browser.execute_script(script)).partition("(")[2].rstrip(")").split(",")[:3]
    return sum(map(float, numbers)) / 3


def focused(browser: Any) -> str:
    """Press the tabulator, and return what has the focus then."""
    browser.switch_to.active_element.send_keys(TAB)
    script = (
        "const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.dataset.key || e.tagName"
    )
    return str(browser.execute_script(script))


def test_the_status_page_shows_every_model(loaded: Served, browser: Any) -> None:
    """It asks for the token once; numbers move; there is no error in its console, and no request to another host."""
    browser.get(f"http://{loaded.http}/")
    waits(lambda: "asks for a token" in browser.find_element("id", "state").text)
    assert cells(browser) == {}
    browser.find_element("id", "token").send_keys(TOKEN + ENTER)
    waits(lambda: len(cells(browser)) == MODELS)
    assert all((row["state"], row["devices"]) == ("ready", "cpu") for row in cells(browser).values())
    for column in ("requests/s", "p50", "p95", "p99", "rows a batch"):
        waits(lambda column=column: all(float(row[column]) > 0 for row in cells(browser).values()))
    assert all(row["failed/s"] == row["failovers"] == "0" for row in cells(browser).values())
    machine = machine_facts()
    assert browser.find_element("id", "version").text == machine["version"]
    assert machine["onnxruntime"] in browser.find_element("id", "machine").text

    browser.refresh()  # the token is kept for this tab, and nowhere else
    waits(lambda: len(cells(browser)) == MODELS)
    assert TOKEN not in browser.current_url
    assert browser.execute_script("return localStorage.length + document.cookie.length") == 0

    waits(lambda: len(titles(browser, "#charts")) == 4 and len(titles(browser, "#devices")) == 2)
    [rate, latency, waiting, rows] = titles(browser, "#charts")
    assert re.fullmatch(r"requests/s: all [\d.]+, failed 0 now, at most [\d.]+", rate)
    assert re.fullmatch(r"latency, ms: p50 [\d.]+, p95 [\d.]+, p99 [\d.]+ now, at most [\d.]+", latency)
    assert waiting.startswith("waiting: ")
    assert rows.startswith("rows a batch: 1.")

    assert [focused(browser) for _ in range(3)] == ["pause", "Models", "product-00/1"]
    browser.switch_to.active_element.send_keys(ENTER)
    waits(lambda: len(titles(browser, ".more")) == 4)
    assert browser.switch_to.active_element.get_attribute("aria-expanded") == "true"
    text = browser.find_element("css selector", ".more:not([hidden])").text
    assert "requests answered and 0 failed" in text
    assert re.search(r"batches on cpu, by their rows: \d+ of 1", text)
    browser.switch_to.active_element.send_keys(ENTER)
    waits(lambda: titles(browser, ".more") == [])

    browser.find_element("id", "pause").send_keys(ENTER)
    still = cells(browser)
    time.sleep(2.5)
    assert cells(browser) == still
    browser.find_element("id", "pause").send_keys(ENTER)
    waits(lambda: cells(browser) != still)

    assert brightness(browser, "dark") < 60 < 200 < brightness(browser, "light")
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400

    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert {urlsplit(url).netloc for url in sent if not url.startswith("data:")} == {loaded.http}
    assert all(TOKEN not in url for url in sent)


def test_a_wrong_token_is_asked_for_again(loaded: Served, browser: Any) -> None:
    """The page says so, shows nothing, and forgets it."""
    browser.get(f"http://{loaded.http}/")
    browser.find_element("id", "token").send_keys("wrong" + ENTER)
    waits(lambda: "the token is wrong" in browser.find_element("id", "state").text)
    assert cells(browser) == {}
    assert browser.find_element("id", "ask").is_displayed()
    assert browser.execute_script("return sessionStorage.length") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_accessible(tmp_path: Path, browser: Any, theme: str) -> None:
    """With the charts of a model; names, contrasts and landmarks, by axe."""
    with serving_under_load(tmp_path, 2) as served:
        prefer_theme(browser, theme)
        browser.get(f"http://{served.http}/")
        waits(lambda: len(cells(browser)) == 2)
        browser.execute_script("document.querySelector('#models button').click()")
        waits(lambda: len(titles(browser, ".more")) == 4)
        assert serious_findings(browser) == []
