"""The report: one file that runs its own scripts only, groups of repeated layers, and the clock of a trace."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sample_reports import sample_report

import rlx_ort.report
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.report.document import Group, _path, grouped, groups_of
from rlx_ort.report.page import OWN_SCRIPTS, rendered, vendored
from rlx_ort.report.trace import Phase, TracedRun

ASSETS = Path(rlx_ort.report.__path__[0]) / "assets"
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@pytest.mark.parametrize("name", vendored())
def test_a_library_is_the_file_of_the_table_and_has_its_licence(name: str) -> None:
    """The hash is that of the npm package's file, and the licence's text lies beside it."""
    library = vendored()[name]
    assert hashlib.sha256((ASSETS / library["file"]).read_bytes()).hexdigest() == library["sha256"]
    licence = (ASSETS / f"{name}.LICENSE.txt").read_text(encoding="utf-8")
    assert library["licence"] == "MIT"
    assert "Permission is hereby granted, free of charge" in licence


def test_every_library_is_in_the_table() -> None:
    """No script but those of the page is without an entry."""
    scripts = {path.name for path in ASSETS.glob("*.js")}
    assert scripts == {*OWN_SCRIPTS, *(library["file"] for library in vendored().values())}


def test_the_policy_of_the_page_allows_its_scripts_and_no_network() -> None:
    """Everything is refused but inline styles and scripts with these hashes."""
    page = rendered([sample_report(2, 4)])
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', page)
    assert policy is not None
    scripts = SCRIPT.findall(page)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == len(vendored()) + 1
    assert policy[1] == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{digest}'" for digest in hashes)
    )
    assert "sourceMappingURL" not in page
    assert re.findall(r'\b(?:src|href)="(?!#|data:)', page.split("<script", 1)[0]) == []


def test_names_of_a_model_cannot_end_the_script() -> None:
    """Names come from files; those with markup arrive as text."""
    name = "</script><script>alert(1)</script><!--"
    page = rendered([sample_report(1, 3, title=name, name=name)])
    assert "<script>alert" not in page
    content = DATA.search(page)
    assert content is not None
    assert json.loads(content[1])["reports"][0]["model"] == name
    assert "<title>&lt;/script&gt;" in page


def test_the_page_of_a_small_model_is_small() -> None:
    """Below 0.4 MB, libraries included."""
    assert len(rendered([sample_report(2, 10)]).encode()) < 400_000


def _trace(folder: Path, clock: Callable[[], int]) -> tuple[Phase, int]:
    """Return the phase in which a session was opened, and where the trace has an event in the middle of it."""
    traced = TracedRun()
    traced.exported = cast("Any", SimpleNamespace(nodes=()))
    with traced.phase("choose"):
        time.sleep(0.01)
    with traced.phase("open"):
        time.sleep(0.005)
        reading_ns = clock()
        time.sleep(0.01)
    profile = folder / "profile.json"
    profile.write_text(json.dumps([{"ph": "X", "cat": "Session", "name": "load", "ts": 2000, "dur": 1}]), "utf-8")
    traced.read_profile(Graph("g"), CompileOptions(), profile, reading_ns)
    [(_, start_ns, _)] = traced.session
    return traced.phases[-1], start_ns


@pytest.mark.parametrize("clock", [time.time_ns, time.perf_counter_ns, time.monotonic_ns])
def test_a_profile_is_placed_by_the_clock_that_timed_it(tmp_path: Path, clock: Callable[[], int]) -> None:
    """The system's clock on Linux, a steady one on Windows and macOS."""
    opened, start_ns = _trace(tmp_path, clock)
    assert opened.start_ns + 7e6 <= start_ns <= opened.start_ns + opened.ns


def test_a_profile_of_an_unknown_clock_begins_with_its_session(tmp_path: Path) -> None:
    """The error is then below the time that the session took to open, and not the age of the clock."""
    opened, start_ns = _trace(tmp_path, lambda: 12345)
    assert start_ns == opened.start_ns + 2_000_000


def _covered(groups: list[Group]) -> list[int]:
    return [at for group in groups for at in range(group.first, group.first + group.count)]


def test_layers_that_repeat_are_groups() -> None:
    """What is before and behind them stays alone."""
    groups = groups_of(np.array([90, 91, *([*range(10)] * 4), 92]))
    assert [(group.first, group.count) for group in groups] == [(2, 10), (12, 10), (22, 10), (32, 10)]
    assert groups[1].label == "repeat 2 of 4"


def test_two_stages_are_found_one_after_the_other() -> None:
    """The rest is looked at again."""
    groups = groups_of(np.array([*([*range(10)] * 6), 99, *([*range(20, 32)] * 3)]))
    assert [group.count for group in groups] == [10] * 6 + [12] * 3


def test_short_repetitions_are_put_together() -> None:
    """A chain of two operators is no hundred groups of two."""
    groups = groups_of(np.array([1, 2] * 40))
    assert {group.count for group in groups} == {8}
    assert _covered(groups) == [*range(80)]


def test_a_small_model_without_repetition_has_no_groups() -> None:
    """It is shown whole."""
    assert groups_of(np.arange(90)) == []
    assert groups_of(np.array([], dtype=np.int64)) == []


@pytest.mark.parametrize("codes", [np.arange(5000), np.zeros(5000, np.int64), np.arange(5000) % 3], ids=str)
def test_a_large_model_has_few_groups_with_every_node(codes: np.ndarray) -> None:
    """The page places some 150 groups and not 5,000 nodes."""
    groups = groups_of(codes)
    assert len(groups) <= 130
    assert len(set(_covered(groups))) == len(_covered(groups)) >= 4960


@pytest.mark.parametrize(
    ("scope", "name", "path"),
    [
        ("layer1.0.conv1", "node_Conv_293", ("layer1", "0", "conv1")),
        ("", "/layer1/layer1.0/conv1/Conv", ("layer1", "0", "conv1")),
        ("", "/bert/encoder/layer.3/Add", ("bert", "encoder", "layer", "3")),
        ("", "encoder.norm.add", ("encoder", "norm")),
        ("", "Conv_12", ()),
    ],
)
def test_the_module_of_a_node_is_its_scope_or_in_its_name(scope: str, name: str, path: tuple[str, ...]) -> None:
    """As PyTorch's exporters note it, the newer one in metadata and the older one in names."""
    assert _path(scope, name) == path


def test_modules_are_groups_inside_each_other() -> None:
    """A module around one other has no group of its own, and a node without a module belongs to its neighbours'."""
    paths = [("stem",), *[("net", "layer", "0", part) for part in ("a", "a", "b")], (), ("net", "layer", "0", "b")]
    paths += [("net", "layer", "1"), ("net", "layer", "1"), ("net", "layer", "1")]
    groups, group_of = grouped(paths, np.arange(9))
    found = [(group.label, group.first, group.count, group.parent) for group in groups]
    assert found == [
        ("net", 1, 8, None),
        ("net.layer.0", 1, 5, 0),
        ("net.layer.0.a", 1, 2, 1),
        ("net.layer.0.b", 3, 3, 1),
        ("net.layer.1", 6, 3, 0),
    ]
    assert group_of == [None, 2, 2, 3, 3, 3, 4, 4, 4]


def test_a_module_that_is_left_and_entered_again_is_two_groups() -> None:
    """A group is a stretch of the order of the nodes, so that no two groups read from each other."""
    groups, _ = grouped([("a",), ("a",), ("b",), ("b",), ("a",), ("a",)], np.arange(6))
    assert [(group.label, group.first) for group in groups] == [("a", 0), ("b", 2), ("a", 4)]


def test_a_deep_model_without_modules_around_its_layers_has_few_groups_at_the_top() -> None:
    """Its many small modules are inside groups of what repeats."""
    groups, _ = grouped([(f"op_{at // 3}",) for at in range(3000)], np.arange(3000) % 60)
    assert 40 <= sum(group.parent is None for group in groups) <= 100
    assert sum(group.label.startswith("op_") for group in groups) == 1000
