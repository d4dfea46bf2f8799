"""The series of bench figures: runs are appended, compared with the same machine's, and drawn."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from developer_scripts import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "series.py"


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the script as a module with an empty series."""
    module = load_script("series")
    monkeypatch.setattr(module, "SERIES", tmp_path / "series.jsonl")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "series.svg")
    return module


def _call(series: ModuleType, monkeypatch: pytest.MonkeyPatch, value: float, processor: str = "One") -> int:
    machine = {"processor": processor, "cores": 2, "python": "3.11", "onnxruntime": "1", "onnx": "1", "numpy": "2"}
    figure = {"family": "export", "figure": "a graph", "value": value, "unit": "s", "target": 1.0}
    lines = "\n".join(map(json.dumps, (machine, figure)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(sys, "argv", ["series.py", "add", "--date", "2026-11-23", "--commit", "abc"])
    return series.main()


def test_a_slower_figure_is_printed(
    series: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is compared with the last run of the same machine, and with its target."""
    assert [_call(series, monkeypatch, value) for value in (0.5, 0.51)] == [0, 0]
    assert _call(series, monkeypatch, 0.9, processor="Other") == 0
    assert capsys.readouterr().out == ""
    assert _call(series, monkeypatch, 1.02) == 1
    assert capsys.readouterr().out == (
        "2.00 of the run before: export: a graph\nmissed its target, 1.02 > 1: export: a graph\n"
    )
    assert [run.machine for run in series.read(series.SERIES)] == ["One, 2 cores"] * 2 + [
        "Other, 2 cores",
        "One, 2 cores",
    ]


def test_the_kept_series_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, series: ModuleType) -> None:
    """Every run that is kept can be read and has a place in the picture."""
    pytest.importorskip("matplotlib")
    results = SCRIPT.parents[1] / "docs" / "results"
    runs = series.read(results / "series.jsonl")
    series.plot(runs, tmp_path / "series.svg")
    drawn = (tmp_path / "series.svg").read_text(encoding="utf-8")
    assert len(runs) >= 12
    assert all(run.machine in drawn for run in runs)
