"""What notebooks show of a graph, the outputs of a run and a report: the facts, with every text escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np

from rlx_ort import Graph, GraphDevices


class _Cells(HTMLParser):
    """The texts of a fragment, and its tags."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Note a tag."""
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.texts.append(data)


def _graph(name: str) -> Graph:
    g = Graph(name)
    g.set_outputs([g.relu(g.input("x", ["batch", 2]))], ["y"])
    return g


def test_a_graph_shows_its_listing_and_no_markup_of_a_name() -> None:
    """Names come from model files."""
    page = _Cells(_graph("<script>alert(1)</script>")._repr_html_())
    assert page.tags == {"details", "summary", "pre"}
    assert "<script>alert(1)</script>" in page.texts[0]
    assert "relu" in page.texts[1]


def test_a_large_graph_shows_how_many_lines_are_left_out() -> None:
    """A notebook stays small."""
    g = Graph("deep")
    value = g.input("x", [2])
    for _ in range(300):
        value = g.relu(value)
    g.outputs = [value]
    assert "lines more" in g._repr_html_()


def test_outputs_and_reports_are_tables() -> None:
    """Name, dtype, shape and values of each output; device, prediction and reason of each row."""
    runner = GraphDevices(_graph("g"))
    outputs = _Cells(runner.run("cpu", {"x": np.array([[-1, 3]], np.float32)})._repr_html_())
    assert outputs.texts[-4:] == ["y", "float32", "[1, 2]", "[0. 3.]"]
    for rows in (runner.report(), runner.rank()):
        shown = _Cells(rows._repr_html_())
        assert {"cpu", "recommended"} <= set(shown.texts)
