"""The page in a real Chromium: drawn in time, quiet, without a network, by keyboard, in the dark."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headless_chromium import headless_chromium, prefer_theme
from sample_reports import sample_report

from rlx_ort.report.page import rendered

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

LAYERS, EACH = 125, 40
OPEN_ALL = """
const done = arguments[0], begun = performance.now();
[...document.querySelectorAll("button")].find((button) => button.textContent === "open all groups").click();
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun), 0)));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a Chromium without a window."""
    with headless_chromium("--window-size=1400,1100", recorded=True) as found:
        yield found


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    """Return a function that opens a page in a light theme."""

    def show(page: str) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        prefer_theme(browser, "light")
        browser.get(path.as_uri())
        ready = "return document.documentElement.dataset.ready"
        WebDriverWait(browser, 30).until(lambda found: found.execute_script(ready))  # on a busy machine `get` is early
        return browser

    return show


def _pixels(browser: Any, element: str) -> np.ndarray:
    import matplotlib.image

    data = browser.find_element("css selector", element).screenshot_as_base64
    image: np.ndarray = matplotlib.image.imread(io.BytesIO(base64.b64decode(data)), format="png")
    return np.round(255 * image[..., :3]).astype(int)


def _share(pixels: np.ndarray, color: str) -> float:
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return float((np.abs(pixels - wanted).max(axis=-1) <= 2).mean())


def test_five_thousand_nodes_are_drawn(opened: Any, browser: Any, record_property: Any) -> None:
    """With the groups closed, then with all of them open; the time that the page's thread took goes to the report."""
    page = rendered([sample_report(LAYERS, EACH)])
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    opened(page)
    browser.execute_async_script(OPEN_ALL)
    assert browser.execute_script("return document.querySelector('.graph').dataset.drawn") == str(LAYERS * (EACH + 1))
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    record_property("thread_s", {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"])


def test_a_large_graph_has_its_edges(opened: Any) -> None:
    """They are lines under the nodes; arrows move along them."""
    from selenium.webdriver.common.keys import Keys

    browser = opened(rendered([sample_report(30, 40)]))
    assert _share(_pixels(browser, ".graph"), "#5b6470") > 0.0005
    graph = browser.find_element("css selector", ".graph")
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP):
        graph.send_keys(key)
    assert browser.find_element("css selector", ".details strong").text == "repeat 2 of 30"


def test_the_page_is_quiet_and_asks_for_nothing(opened: Any) -> None:
    """No message on the console, and no request but that of the file."""
    page = rendered([sample_report(3, 12)])
    opened(page).get_log("performance")
    browser = opened(page)
    browser.execute_async_script(OPEN_ALL)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert {message["params"]["request"]["url"].partition(":")[0] for message in requests} <= {"file", "data"}
    assert sum(message["params"]["request"]["url"].startswith("file") for message in requests) == 1


def test_the_page_has_every_section(opened: Any) -> None:
    """Devices, graph, splits with prices and repairs, costs, parts, roofline, timeline."""
    browser = opened(rendered([sample_report(3, 12)]))
    titles = [title.text for title in browser.find_elements("css selector", "h2")]
    assert titles == [
        "Devices", "Graph on webgpu", "What splits the graph, and how to repair it", "Nodes that cost most",
        "Predicted against measured", "Roofline", "Timeline of the first run",
    ]  # fmt: skip
    text = browser.find_element("css selector", "body").text
    for part in ("6 values are copied in each run, which is predicted to take 42 µs", "--dim batch=4", "no kernel"):
        assert part in text
    assert len(browser.find_elements("css selector", "canvas[role=img]")) == 3


def test_the_graph_is_used_by_keyboard(opened: Any) -> None:
    """Arrows select nodes along the graph, Enter opens a group and closes it, Tab reaches each control."""
    from selenium.webdriver.common.keys import Keys

    browser = opened(rendered([sample_report(5, 12)]))
    box = browser.find_element("css selector", ".graph")
    details = browser.find_element("css selector", ".details")
    seen = []
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.switch_to.active_element.get_attribute("role"))
        if seen[-1] == "application":
            break
    assert seen[-1] == "application"
    for key, expected in (
        (Keys.ARROW_DOWN, "repeat 1 of 5"),
        (Keys.ARROW_DOWN, "repeat 2 of 5"),
        (Keys.ENTER, "node_1_0"),
        (Keys.ARROW_DOWN, "node_1_1"),
        (Keys.ARROW_UP, "node_1_0"),
        (Keys.ENTER, "repeat 2 of 5"),
        (Keys.ARROW_UP, "repeat 1 of 5"),
    ):
        box.send_keys(key)
        assert details.text.startswith(expected), (key, details.text)


def test_a_node_is_found_by_its_name_and_from_the_table(opened: Any) -> None:
    """The group around it opens."""
    from selenium.webdriver.common.keys import Keys

    browser = opened(rendered([sample_report(5, 12)]))
    details = browser.find_element("css selector", ".details")
    browser.find_element("css selector", "input[type=search]").send_keys("node_3_7", Keys.ENTER)
    assert details.text.startswith("node_3_7 MatMul")
    browser.find_element("css selector", "td button").click()
    assert details.text.startswith("node_0_11")


def test_the_graph_shows_devices_crossings_and_times(opened: Any) -> None:
    """A screenshot has the colours of both devices and of crossings; coloured by time, it has those of times."""
    browser = opened(rendered([sample_report(2, 12)]))
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    pixels = _pixels(browser, ".graph")
    assert _share(pixels, "#e69f00") > 0.01  # WebGPU, the second provider by name
    assert _share(pixels, "#56b4e9") > 0.0005  # the CPU
    assert _share(pixels, "#c0153e") > 0  # thin lines
    mode = browser.find_element("css selector", "select[aria-label='Colour by']")
    mode.send_keys("colour by measured")
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert _share(_pixels(browser, ".graph"), "#e69f00") == 0


def test_the_page_follows_a_dark_system(opened: Any) -> None:
    """The background and the graph turn dark while the page is open."""
    browser = opened(rendered([sample_report(2, 12)]))
    light = _pixels(browser, "body").mean()
    prefer_theme(browser, "dark")
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert light > 200
    assert _pixels(browser, "body").mean() < 80
    assert _share(_pixels(browser, ".graph"), "#b97f00") > 0.01
    assert browser.get_log("browser") == []


def test_two_reports_are_side_by_side(opened: Any) -> None:
    """With the comparison of their outputs above."""
    output = {"name": "y", "shape": [2], "max_abs": 1e-7, "relative_l2": 1e-7, "cosine": 1.0, "ok": True}
    comparison = {"tolerance": {"relative_l2": 1e-5}, "outputs": [output]}
    browser = opened(rendered([sample_report(2, 12, "a"), sample_report(2, 12, "b")], comparison))
    left, right = (found.rect for found in browser.find_elements("css selector", "article"))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    assert "relative L2" in browser.find_element("id", "comparison").text


def test_names_with_markup_stay_text(opened: Any) -> None:
    """A name from a file runs no script."""
    name = "<img src=x onerror=document.title='taken'>"
    browser = opened(rendered([sample_report(1, 12, title=name, name=name)]))
    assert name in browser.find_element("css selector", "h1").text
    assert browser.title == name
    assert browser.get_log("browser") == []
