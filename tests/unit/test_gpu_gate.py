"""The record of the GPU gate belongs to the code that it is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from developer_scripts import load_script

import rlx_ort

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "results" / "gpu-gate.json"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    return load_script("gpu_gate")


def test_the_record_is_of_the_capability_data_and_the_lowerings_as_they_are(gate: ModuleType) -> None:
    """Other models, verdicts or sessions for CUDA need another run of scripts/gpu_gate.py, which a GPU can do.

    Elsewhere the age of the record is shown as the reason of a skip (`pytest -rs`), and fails nothing.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    fresh = record["covered"] == gate.covered_digest()
    if not rlx_ort.is_available("cuda"):
        state = "is up to date" if fresh else "is older than the code; run scripts/gpu_gate.py on a GPU"
        pytest.skip(f"the record of {record['date']}, commit {record['commit'][:8]}, {state}")
    assert fresh


def test_the_record_is_of_a_run_that_passed(gate: ModuleType) -> None:
    """Every part ran, nothing failed that is not known, and the device is one that CI does not have."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["device"] == "cuda"
    assert record["machine"]["available"] == "True"
    assert record["suite"]["failures"] == []
    assert [part for part in ("suite", "truth", "webgpu") if not record[part]["ok"]] == []
    assert record["calibration"]["ok"] is not False  # None, with the reason beside it, where it did not run alone


@pytest.fixture
def call(gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a call of the gate on a machine where every part passes at once."""
    monkeypatch.setattr(gate, "machine", lambda device: {"hardware": "H", "onnxruntime": "1"})
    monkeypatch.setattr(gate, "covered_digest", lambda: "as it is")  # takes ten seconds
    for name in ("suite", "truth", "figures", "models"):
        monkeypatch.setattr(gate, name, lambda *given, **more: {"ok": True, "limit_s": given[-1]})

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["gpu_gate.py", "--out", str(tmp_path), *arguments])
        assert gate.main() == 0
        found: dict[str, Any] = json.loads((tmp_path / "gpu-gate.json").read_text(encoding="utf-8"))
        return found

    return run


def test_the_capability_page_and_the_support_table_are_made_from_the_records() -> None:
    """scripts/capability_page.py was run after the last record."""
    written = load_script("capability_page")
    assert written.PAGE.read_text(encoding="utf-8") == written.page()
    assert written.support_row() in written.DEVICES.read_text(encoding="utf-8").splitlines()
