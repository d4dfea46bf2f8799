"""`--html`, `--open` and `--trace`: what the commands write and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

SIZES = ("--dim", "batch=2", "--dim", "tokens=8")


def _content(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_report_writes_the_page_and_the_trace(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """The page has the rows that the command prints, and a view of the device that was run."""
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    outcome = cli("report", classifier, "--only", "cpu", *SIZES, "--html", page, "--trace", trace, "--json")
    [report] = _content(page)["reports"]
    assert (report["schema"], report["model"], report["dims"]) == (2, "classifier.onnx", {"batch": 2, "tokens": 8})
    assert report["devices"] == outcome.document["devices"]
    [view] = report["views"]
    assert view["device"] == "cpu"
    assert [group["count"] for group in view["groups"]] == [34, 34]
    names = {event["name"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]}
    assert {"choose", "export", "open", "copy in", "run", "copy out", "q_flat0"} <= names


def test_open_shows_the_page(cli: Cli, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the browser of the system, by its address."""
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    cli("report", add_one, "--only", "cpu", "--html", tmp_path / "page.html", "--open")
    assert shown == [(tmp_path / "page.html").as_uri()]


def test_bench_writes_the_page_with_the_times_it_measured(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The measured time of the page is the benchmark's median."""
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    options = ("--device", "cpu", "--runs", "3", "--html", page, "--trace", trace, "--json")
    outcome = cli("bench", add_one, *options)
    [view] = _content(page)["reports"][0]["views"]
    assert view["measured_ns"] == outcome.document["devices"][0]["p50_ns"]
    assert trace.exists()


def test_bench_writes_the_page_with_a_device_that_fails(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The others are on it, with each time of theirs, and the failure is in its row."""
    page = tmp_path / "page.html"
    cli("bench", add_one, "--device", "cpu,tpu", "--runs", "3", "--html", page)
    [report] = _content(page)["reports"]
    rows = {row["device"]: row for row in report["devices"]}
    assert len(rows["cpu"]["times_ns"]) == 3
    assert rows["cpu"]["p50_ns"] in rows["cpu"]["times_ns"]
    assert "TPU is not available" in rows["tpu"]["failure"]
    assert [view["device"] for view in report["views"]] == ["cpu"]


def test_compare_puts_two_reports_side_by_side(cli: Cli, add_one: Path, classifier: Path, tmp_path: Path) -> None:
    """With the outputs and how far they are apart."""
    other, page = tmp_path / "other.onnx", tmp_path / "page.html"
    other.write_bytes(add_one.read_bytes())
    assert cli("compare", add_one, other, "--html", page).code == 0
    content = _content(page)
    assert [report["model"] for report in content["reports"]] == ["add_one.onnx on cpu", "other.onnx on cpu"]
    assert [(row["name"], row["ok"]) for row in content["comparison"]["outputs"]] == [("y", True)]


def test_run_writes_a_trace_of_the_run_it_prints(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The device, the placement and the outputs are those of any run."""
    trace = tmp_path / "trace.json"
    outcome = cli("run", add_one, "--device", "cpu", "--dim", "rows=3", "--trace", trace, "--json")
    assert (outcome.document["device"], outcome.document["outputs"][0]["shape"]) == ("cpu", [3, 2])
    names = [event["name"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    assert [name for name in names if name in ("run", "copy out")] == ["run", "copy out"]


def test_a_page_that_cannot_be_written_is_an_error(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The path is in the message, and there is no traceback."""
    outcome = cli("report", add_one, "--only", "cpu", "--html", tmp_path / "missing" / "page.html")
    assert outcome.code != 0
    assert "page.html" in outcome.err
