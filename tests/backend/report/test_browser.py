"""The page in a real Chromium: drawn in time, no line through a node, quiet, by keyboard, accessible, in the dark."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headless_chromium import headless_chromium, prefer_theme, serious_findings
from sample_reports import sample_report

from rlx_ort.report.document import grouped
from rlx_ort.report.page import rendered

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

LAYERS, EACH = 125, 40
DRAWN_S = 3.0  # of the page's own thread, for a graph of 5,000 nodes
LEAST_LABEL_PX = 10
WIDTHS = (1280, 400)
PRESS = "[...document.querySelectorAll('button')].find((button) => button.textContent === arguments[0]).click();"
LABELS = (
    "return [...document.querySelectorAll('.unit text')].map((text) => parseFloat(getComputedStyle(text).fontSize))"
)
GEOMETRY = """
const numbers = (text) => text.match(/-?[\\d.]+(?:e-?\\d+)?/g).map(Number);
const boxes = [...document.querySelectorAll(".unit:not(.open)")].map((unit) => {
  const box = unit.querySelector(".box"), size = ["width", "height"].map((side) => Number(box.getAttribute(side)));
  return [...numbers(unit.getAttribute("transform")), ...size];
});
return { boxes, lines: [...document.querySelectorAll(".lines path")].map((path) => numbers(path.getAttribute("d"))) };
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a Chromium without a window."""
    with headless_chromium("--window-size=1400,1100", recorded=True) as found:
        yield found


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    """Return a function that opens a page of some width in a light theme."""

    def show(page: str, width: int = 1400) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        prefer_theme(browser, "light")
        size = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
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


def _tangled(seed: int, count: int) -> dict[str, Any]:
    """Return a report of a graph with edges that skip many nodes, in modules inside modules."""
    chance = random.Random(seed)
    report = sample_report(1, count)
    [view] = report["views"]
    paths = [("net", str(at // 30), "ab"[at % 30 // 15]) for at in range(count)]
    found, group_of = grouped(paths, np.arange(count))
    view["groups"] = [asdict(group) for group in found]
    for node, path, group in zip(view["nodes"], paths, group_of, strict=True):
        node |= {"module": ".".join(path), "group": group}
    view["edges"] = sorted(
        {
            (max(0, at - chance.choice([1, 1, 1, 2, 3, 7, chance.randint(1, at)])), at, -1)
            for at in range(1, count)
            for _ in range(chance.choice([1, 1, 2]))
        }
    )
    view["crossings"] = []
    return report


def _segments(lines: list[list[float]]) -> np.ndarray:
    """Return the stretches of lines as rows of x and y of both ends."""
    points = [np.reshape(line, (-1, 2)) for line in lines]
    return np.concatenate([np.hstack([each[:-1], each[1:]]) for each in points])


def _touching(low: np.ndarray, high: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return for rows of corners and boxes (x, y, width, height) whether they share more than an edge."""
    starts, ends = boxes[:, :2] + 0.5, boxes[:, :2] + boxes[:, 2:] - 0.5
    return np.asarray(((low[:, None] < ends) & (high[:, None] > starts)).all(axis=-1))


@pytest.mark.parametrize(
    "report", [sample_report(6, 12), _tangled(1, 60), _tangled(2, 240)], ids=["layers", "tangled", "large and tangled"]
)
@pytest.mark.parametrize("button", ["open all groups", "close all groups"])
def test_no_line_passes_through_a_node(opened: Any, report: dict[str, Any], button: str) -> None:
    """Each stretch of a line is straight up or across, no node overlaps another, and every node has its lines."""
    browser = opened(rendered([report]))
    browser.execute_script(PRESS, button)
    browser.execute_script(PRESS, "show all")
    drawn = browser.execute_script(GEOMETRY)
    boxes, segments = np.array(drawn["boxes"]), _segments(drawn["lines"])
    [view] = report["views"]
    if button == "open all groups":
        assert len(boxes) == len(view["nodes"])
        assert len(drawn["lines"]) >= len(view["edges"])
    ends = segments.reshape(-1, 2, 2)
    assert (np.abs(ends[:, 0] - ends[:, 1]).min(axis=-1) < 0.01).all()
    assert not _touching(ends.min(axis=1), ends.max(axis=1), boxes).any()
    overlaps = _touching(boxes[:, :2], boxes[:, :2] + boxes[:, 2:], boxes)
    assert overlaps.sum() == len(boxes)  # each with itself


def test_five_thousand_nodes_are_drawn_in_time(opened: Any, browser: Any, record_property: Any) -> None:
    """The page is there in three seconds of its thread; all groups open is another such time at most."""
    page = rendered([sample_report(LAYERS, EACH)])
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})

    def spent_s() -> float:
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float({metric["name"]: metric["value"] for metric in metrics}["TaskDuration"])

    opened(page)
    first_s = spent_s()
    browser.execute_script(PRESS, "open all groups")
    record_property("thread_s", (first_s, spent_s()))
    assert browser.execute_script("return document.querySelector('.graph').dataset.drawn") == str(LAYERS * (EACH + 1))
    assert first_s < DRAWN_S
    assert spent_s() - first_s < DRAWN_S


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_are_readable_at_the_first_zoom(opened: Any, browser: Any, width: int) -> None:
    """Of a small graph and a large one; the overview shows where it is looked at."""
    for report in (sample_report(2, 6), sample_report(LAYERS, EACH)):
        opened(rendered([report]), width)
        zoom = float(browser.execute_script("return document.querySelector('.graph').dataset.zoom"))
        shown = browser.execute_script(LABELS)
        assert len(shown) >= 6
        assert zoom * min(shown) >= LEAST_LABEL_PX
    assert browser.find_element("css selector", ".map").is_displayed()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_accessible_and_fits_its_width(opened: Any, width: int, theme: str) -> None:
    """Axe has no serious finding, and nothing but tables scrolls sideways; with a node's details shown."""
    report = sample_report(3, 12)
    report["devices"][0] |= {"p50_ns": 3e6, "p90_ns": 4e6, "p99_ns": 5e6, "times_ns": [3e6, 4e6, 5e6]}
    browser = opened(rendered([report]), width)
    prefer_theme(browser, theme)
    browser.refresh()
    browser.find_element("css selector", "input[type=search]").send_keys("node_1_7", "\ue007")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    assert serious_findings(browser) == []


def test_the_page_is_quiet_and_asks_for_nothing(opened: Any) -> None:
    """No message on the console, and no request but that of the file."""
    page = rendered([sample_report(3, 12)])
    opened(page).get_log("performance")
    browser = opened(page)
    browser.execute_script(PRESS, "open all groups")
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert {message["params"]["request"]["url"].partition(":")[0] for message in requests} <= {"file", "data"}
    assert sum(message["params"]["request"]["url"].startswith("file") for message in requests) == 1


def test_the_page_has_every_section(opened: Any) -> None:
    """Where, what, faster; devices, graph, splits with prices and repairs, costs, parts, roofline, timeline."""
    browser = opened(rendered([sample_report(3, 12)]))
    titles = [title.text for title in browser.find_elements("css selector", "h2")]
    assert titles == [
        "Devices", "Where it runs", "What it costs", "What would make it faster", "Graph on webgpu",
        "What splits the graph, and how to repair it", "Nodes that cost most", "Predicted against measured", "Roofline",
        "Timeline of the first run",
    ]  # fmt: skip
    text = browser.find_element("css selector", "body").text
    for part in ("6 values are copied in each run, which is predicted to take 42 µs", "--dim batch=4", "no kernel"):
        assert part in text
    for part in ("2026-11-26 01:00 UTC", "a CPU, 2 threads", "rlx_ort 0.1.0", "onnxruntime 1.31.1", "SwiftShader"):
        assert part in text
    assert len(browser.find_elements("css selector", ".chart canvas[role=img]")) == 3


def test_a_benchmark_shows_its_percentiles_memory_and_distribution(opened: Any) -> None:
    """A device that failed has its reason, and rows and columns without a figure are left out."""
    report = sample_report(2, 6)
    measured = {"p50_ns": 3e6, "p90_ns": 4e6, "p99_ns": 5e6, "times_ns": [3e6, 4e6, 5e6], "host_memory_bytes": 1 << 20}
    report["devices"][0] |= measured
    report["devices"] += [{"device": "cpu", "failure": "out of memory", "p50_ns": None}, {"device": "opengl"}]
    browser = opened(rendered([report]))
    table = browser.find_element("css selector", "table")
    assert [cell.text for cell in table.find_elements("css selector", "th")] == [
        "device", "p50", "p90", "p99", "host memory", "predicted", "placed there", "predicted from", "failure",
    ]  # fmt: skip
    rows = [row.text for row in table.find_elements("css selector", "tbody tr")]
    assert rows == ["webgpu (chosen) 3 ms 4 ms 5 ms 1 MiB 2 ms 90 % default: sample", "cpu out of memory"]
    assert _share(_pixels(browser, ".chart"), "#56b4e9") > 0.0005


def test_the_graph_is_used_by_keyboard(opened: Any) -> None:
    """Arrows select nodes along the graph, Enter opens a group and closes it, Tab reaches each control."""
    from selenium.webdriver.common.keys import Keys

    browser = opened(rendered([sample_report(5, 12)]))
    browser.execute_script(PRESS, "close all groups")
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
        (Keys.ARROW_DOWN, "layers.0"),
        (Keys.ARROW_DOWN, "layers.1"),
        (Keys.ENTER, "node_1_0"),
        (Keys.ARROW_DOWN, "node_1_1"),
        (Keys.ARROW_UP, "node_1_0"),
        (Keys.ENTER, "layers.1"),
        (Keys.ARROW_UP, "layers.0"),
    ):
        box.send_keys(key)
        assert details.text.startswith(expected), (key, details.text)


def test_nodes_are_found_as_their_name_or_module_is_typed(opened: Any) -> None:
    """The groups around a node that is chosen open; a name in the table leads to its node too."""
    from selenium.webdriver.common.keys import Keys

    browser = opened(rendered([sample_report(5, 12)]))
    browser.execute_script(PRESS, "close all groups")
    details = browser.find_element("css selector", ".details")
    search = browser.find_element("css selector", "input[type=search]")
    search.send_keys("node_3_")
    hits = browser.find_elements("css selector", ".hits button")
    assert [hit.text.rpartition(" ")[2] for hit in hits] == [f"node_3_{at}" for at in range(8)]
    assert len(browser.find_elements("css selector", ".unit.match")) == 1  # the group around them
    search.send_keys("7", Keys.ENTER)
    assert details.text.startswith("node_3_7")
    assert "layers.3" in details.text
    search.clear()
    search.send_keys("no such node")
    assert "no such node" in browser.find_element("css selector", ".hits").text
    browser.find_element("css selector", "td button").click()
    assert details.text.startswith("node_0_11")


def test_the_side_panel_shows_costs_and_leads_to_neighbours(opened: Any) -> None:
    """A node with what it reads, and a group with its most expensive nodes; one without a time says why."""
    report = sample_report(2, 12)
    report["views"][0]["nodes"][3]["measured_ns"] = None
    browser = opened(rendered([report]))
    browser.find_element("css selector", "[data-id=n4]").click()
    details = browser.find_element("css selector", ".details")
    assert "measured\n1.5 µs, 4 % of all nodes" in details.text
    details.find_element("xpath", ".//button[contains(., 'node_0_3')]").click()
    assert "fused it into another node" in details.text
    browser.find_element("css selector", "[data-id=g0].open text").click()  # its title, which closes it
    browser.find_element("css selector", "[data-id=g0]:not(.open)").click()
    assert "node_0_11 MatMul" in details.text.partition("most expensive in it")[2]


def test_the_graph_shows_times_devices_categories_and_crossings(opened: Any) -> None:
    """By measured time at first; a screenshot has the colours of both devices where they are asked for."""
    from selenium.webdriver.support.ui import Select

    browser = opened(rendered([sample_report(2, 12)]))
    hot = _share(_pixels(browser, ".graph"), "#f08a3c")
    assert hot > 0
    mode = browser.find_element("css selector", "select[aria-label='Colour by']")
    assert mode.get_attribute("value") == "measured_ns"
    Select(mode).select_by_value("device")
    pixels = _pixels(browser, ".graph")
    assert _share(pixels, "#e69f00") > 0.01  # WebGPU, the second provider by name
    assert _share(pixels, "#56b4e9") > 0.0005  # the CPU
    assert _share(pixels, "#c0153e") > 0  # thin lines
    Select(mode).select_by_value("category")
    assert _share(_pixels(browser, ".graph"), "#f4a261") > 0.01  # products
    assert browser.find_element("css selector", ".legend").text.split("\n")[:2] == ["products", "elementwise"]


def test_the_page_follows_a_dark_system(opened: Any) -> None:
    """The background and the graph turn dark while the page is open."""
    browser = opened(rendered([sample_report(2, 12)]))
    light = _pixels(browser, "body").mean()
    prefer_theme(browser, "dark")
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert light > 200
    assert _pixels(browser, "body").mean() < 80
    assert _share(_pixels(browser, ".graph"), "#a8481a") > 0
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
