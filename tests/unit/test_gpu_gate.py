"""The record of the GPU gate belongs to the code that it is about."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "results" / "gpu-gate.json"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    return script("gpu_gate")


def test_the_record_is_of_the_capability_data_and_the_lowerings_as_they_are(gate: ModuleType) -> None:
    """A change to what the gate covers needs another run of scripts/gpu_gate.py on a GPU; comments do not count."""
    assert json.loads(RECORD.read_text(encoding="utf-8"))["covered"] == gate.covered_digest()


def test_the_record_is_of_a_run_that_passed(gate: ModuleType) -> None:
    """Every part ran, nothing failed that is not known, and the device is one that CI does not have."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["device"] == "cuda"
    assert record["machine"]["available"] == "True"
    assert record["suite"]["failures"] == []
    assert {part: record[part]["ok"] for part in ("suite", "truth", "checks")} == dict.fromkeys(
        ("suite", "truth", "checks"), True
    )


def test_a_comment_does_not_change_the_digest_and_a_statement_does(
    gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what the code does."""
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "COVERED", ("covered.py",))
    file = tmp_path / "covered.py"
    found = []
    for text in ('"""One."""\nx = 1\n', '"""Two."""\n# why\nx = 1\n', "x = 2\n"):
        file.write_text(text, encoding="utf-8")
        found.append(gate.covered_digest())
    assert found[0] == found[1]
    assert found[2] not in found[:2]


def test_the_capability_page_and_the_readme_are_made_from_the_records() -> None:
    """scripts/capability_page.py was run after the last record."""
    written = script("capability_page")
    assert written.PAGE.read_text(encoding="utf-8") == written.page()
    assert written.readme_row() in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
