"""The status page in Chromium: 20 models under load, behind a token.

`STATUS_PICTURE` names a file to keep the picture in; `docs/pictures/serving-status.png` was made so.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fault_provider import until
from headless_chromium import headless_chromium, prefer_theme
from served_attacks import GOOD
from served_models import Served, save_product, serving

from rlx_ort.serving.options import HttpOptions

pytestmark = pytest.mark.chromium
MODELS, TOKEN, TAB, ENTER = 20, "open sesame", "\ue004", "\ue007"
_LARGEST = 200 << 10


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Served]:
    """Yield a server with a token and 20 models that clients ask all the time."""
    for at in range(MODELS):
        save_product(tmp_path / f"product-{at:02}.onnx", at + 1)
    ended = threading.Event()

    def ask(served: Served, first: int) -> None:
        connection = http.client.HTTPConnection(served.http, timeout=20)
        at = first
        while not ended.wait(0.002):
            at += 3
            path = f"/v2/models/product-{at % MODELS:02}/infer"
            connection.request("POST", path, json.dumps(GOOD), {"Authorization": f"Bearer {TOKEN}"})
            connection.getresponse().read()
        connection.close()

    with serving(tmp_path, http=HttpOptions(token=TOKEN)) as served:
        clients = [threading.Thread(target=ask, args=(served, first)) for first in range(4)]
        for client in clients:
            client.start()
        yield served
        ended.set()
        for client in clients:
            client.join()


@pytest.fixture
def browser() -> Iterator[Any]:
    """Yield a Chromium without a window, whose console and network are recorded."""
    with headless_chromium("--window-size=1280,960", recorded=True) as driver:
        yield driver


def cells(browser: Any) -> dict[str, list[str]]:
    """Return the texts of the table by model."""
    script = "return [...document.querySelectorAll('#models tr')].map(row => [...row.cells].map(c => c.textContent))"
    return {row[0]: row[1:] for row in browser.execute_script(script)}


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
    script = "const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.tagName"
    return str(browser.execute_script(script))


def test_the_status_page_shows_every_model(loaded: Served, browser: Any, tmp_path: Path) -> None:
    """It asks for the token once; numbers move; there is no error in its console, and no request to another host."""
    browser.get(f"http://{loaded.http}/")
    waits(lambda: "asks for a token" in browser.page_source)
    assert cells(browser) == {}
    browser.find_element("id", "token").send_keys(TOKEN + ENTER)
    waits(lambda: len(cells(browser)) == MODELS)
    assert all(row[1] == "ready" and row[2] == "cpu" for row in cells(browser).values())
    first = {name: int(row[3]) for name, row in cells(browser).items()}
    waits(lambda: all(int(row[3]) > first[name] and float(row[6]) > 0 for name, row in cells(browser).items()))
    assert all(float(row[7]) > 0 for row in cells(browser).values())

    browser.refresh()  # the token is kept for this tab, and nowhere else
    waits(lambda: len(cells(browser)) == MODELS)
    assert TOKEN not in browser.current_url
    assert browser.execute_script("return localStorage.length + document.cookie.length") == 0

    assert [focused(browser), focused(browser)] == ["pause", "Models"]
    browser.find_element("id", "pause").send_keys(ENTER)
    still = cells(browser)
    time.sleep(2.5)
    assert cells(browser) == still
    browser.find_element("id", "pause").send_keys(ENTER)
    waits(lambda: cells(browser) != still)

    assert brightness(browser, "dark") < 60 < 200 < brightness(browser, "light")
    picture = Path(os.environ.get("STATUS_PICTURE") or tmp_path / "status.png")
    time.sleep(0 if "STATUS_PICTURE" not in os.environ else 20)  # until the charts have some length
    assert browser.save_screenshot(str(picture))
    assert 0 < picture.stat().st_size < _LARGEST

    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert {urlsplit(url).netloc for url in sent if not url.startswith("data:")} == {loaded.http}
    assert all(TOKEN not in url for url in sent)


def test_a_wrong_token_is_asked_for_again(loaded: Served, browser: Any) -> None:
    """The page says so, shows nothing, and forgets it."""
    browser.get(f"http://{loaded.http}/")
    browser.find_element("id", "token").send_keys("wrong" + ENTER)
    waits(lambda: "the token is wrong" in browser.page_source)
    assert cells(browser) == {}
    assert browser.find_element("id", "ask").is_displayed()
    assert browser.execute_script("return sessionStorage.length") == 0
